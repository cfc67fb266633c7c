"""Spectral convolutions against complex NumPy in float64, and closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixer_jax.models import spectral


def conv(modes, features=2):
  return spectral.SpectralConv(features, modes, jax.nn.initializers.normal(0.5))


def kernel(modes, rank, channels=3, features=2, seed=0):
  count = modes if rank == 1 else 2 * modes**2
  rng = np.random.default_rng(seed)
  return rng.normal(size=(count, 2 * channels, features)).astype(np.float32)


def apply(modes, weights, x):
  return jax.jit(conv(modes).apply)({"params": {"modes": {"kernel": weights}}}, x)


def in_numpy(weights, x, modes):
  """The same by complex matrices; the transforms are not divided on the way there."""
  w = np.float64(weights)
  w = w[:, : w.shape[1] // 2] + 1j * w[:, w.shape[1] // 2 :]
  grid, axes = x.shape[1:-1], tuple(range(1, x.ndim - 1))
  spectrum = np.fft.rfftn(np.float64(x), axes=axes)
  y = np.zeros((*spectrum.shape[:-1], w.shape[-1]), complex)
  if len(grid) == 1:
    for k in range(modes):
      y[:, k] = spectrum[:, k] @ w[k]
  else:
    rows = [*range(modes), *range(grid[0] - modes, grid[0])]
    for i, row in enumerate(rows):
      for k in range(modes):
        y[:, row, k] = spectrum[:, row, k] @ w[i * modes + k]
  return np.fft.irfftn(y, grid, axes=axes)


# Odd and even grids; 5 modes on 8 points, or 4 on 6, have the Nyquist frequency among them.
GRIDS = [((7,), 4), ((8,), 5), ((9,), 2), ((1,), 1), ((8, 6), 4), ((7, 9), 3), ((2, 2), 1)]


@pytest.mark.parametrize("grid, modes", GRIDS)
@pytest.mark.first(3)
def test_equals_complex_matrices_in_numpy(grid, modes):
  x = np.random.default_rng(1).normal(size=(2, *grid, 3)).astype(np.float32)
  weights = kernel(modes, len(grid))
  y = apply(modes, weights, x)
  assert y.shape == (2, *grid, 2)
  np.testing.assert_allclose(y, in_numpy(weights, x, modes), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n", [16, 23])
def test_a_wave_is_turned_by_its_mode_on_every_grid(n):
  weights, places = kernel(5, 1, channels=1), np.arange(n) / n
  w = weights[:, 0] + 1j * weights[:, 1]
  waves = np.stack([np.cos(2 * np.pi * k * places + 0.3) for k in range(8)])
  phases = np.exp(1j * (2 * np.pi * np.arange(5)[:, None] * places + 0.3))
  expected = np.einsum("kn,kf->knf", phases, w).real
  expected[0] = np.cos(0.3) * w[0].real  # of the mean, only the real part is left
  y = apply(5, weights, waves[:, :, None].astype(np.float32))
  np.testing.assert_allclose(y[:5], expected, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(y[5:], 0, atol=1e-5)


@pytest.mark.thorough
def test_a_block_adds_a_dense_layer_and_drops_on_the_spectral_path_alone():
  x = np.random.default_rng(0).normal(size=(2, 8, 3)).astype(np.float32)
  start = jax.nn.initializers.normal(0.5)
  block = spectral.SpectralBlock(2, 3, start, jnp.tanh, dropout_rate=0.5)
  params = jax.jit(block.init)(jax.random.key(0), x)["params"]
  skip = x @ params["skip"]["kernel"] + params["skip"]["bias"]
  both = np.tanh(in_numpy(params["conv"]["modes"]["kernel"], x, 3) + skip)
  np.testing.assert_allclose(block.apply({"params": params}, x), both, rtol=1e-4, atol=1e-5)
  params["conv"] = jax.tree.map(jnp.zeros_like, params["conv"])
  dropped = block.apply({"params": params}, x, train=True, rngs={"dropout": jax.random.key(1)})
  np.testing.assert_allclose(dropped, np.tanh(skip), rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
def test_bfloat16_transforms_in_float32():
  x = np.random.default_rng(0).normal(size=(2, 8, 3)).astype(np.float32)
  low = spectral.SpectralConv(2, 3, jax.nn.initializers.normal(0.5), "bfloat16")
  params = jax.jit(low.init)(jax.random.key(0), x)
  y = low.apply(params, x)
  assert y.dtype == jnp.bfloat16 and params["params"]["modes"]["kernel"].dtype == jnp.float32
  expected = in_numpy(params["params"]["modes"]["kernel"], x, 3)
  np.testing.assert_allclose(np.float32(y), expected, rtol=0.02, atol=0.01)
