"""Nets of a point: periods, embeddings, starts, and the sizes of published nets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixer_jax.models import PointMlp

DOMAIN = dict(functions=1, low=(-1.0, 0.0), high=(1.0, 1.0))


def made(**fields):
  """A net, its variables, and the net of points [n, 2]."""
  net = PointMlp(**DOMAIN | fields)
  variables = net.init(jax.random.key(0), jnp.zeros(len(net.low)))
  return net, variables, jax.vmap(lambda x: net.apply(variables, x))


@pytest.mark.parametrize(
  "dim, widths, number",
  [
    (2, (64,), 257),
    (2, (64, 64, 48, 48), 9873),
    (2, (256, 256, 128, 128), 116097),
    (5, (64, 64, 48, 48), 10065),
    (100, (768, 768, 512, 512), 1325057),
  ],
)
def test_sizes_are_those_of_arxiv_2405_15603(dim, widths, number):
  net = PointMlp(1, (0.0,) * dim, (1.0,) * dim, hidden_dims=widths)
  shapes = jax.eval_shape(net.init, jax.random.key(0), jnp.zeros(dim))
  assert sum(x.size for x in jax.tree.leaves(shapes)) == number


def test_it_is_dense_layers():
  _, variables, net = made(hidden_dims=(5, 4), functions=3)
  x = np.random.default_rng(0).uniform(size=(7, 2)).astype(np.float32)
  y, layers = x, variables["params"]
  for i in range(3):
    y = y @ layers[f"Dense_{i}"]["kernel"] + layers[f"Dense_{i}"]["bias"]
    y = np.tanh(y) if i < 2 else y
  np.testing.assert_allclose(net(x), y, rtol=2e-5, atol=1e-6)


def test_it_is_periodic_with_all_derivatives():
  *_, net = made(periods=(2.0, 0.0), harmonics=3, hidden_dims=(8,))
  x = np.array([[-1.0, 0.3], [1.0, 0.3], [1.0, 0.4]], np.float32)
  slope = jax.vmap(jax.hessian(lambda x: net(x[None])[0, 0]))(x)
  np.testing.assert_allclose(net(x)[0], net(x)[1], atol=1e-6)
  np.testing.assert_allclose(slope[0], slope[1], atol=1e-4)
  assert abs(net(x)[1] - net(x)[2]).max() > 1e-4


def test_scaled_inputs_lie_between_minus_one_and_one():
  _, variables, net = made(scaled=True, low=(2.0, 0.0), high=(6.0, 10.0))
  plain = PointMlp(**DOMAIN)
  x = np.array([[2.0, 0.0], [6.0, 10.0], [4.0, 2.5]], np.float32)
  expected = jax.vmap(lambda x: plain.apply(variables, x))(
    np.array([[-1, -1], [1, 1], [0, -0.5]], np.float32)
  )
  np.testing.assert_allclose(net(x), expected, rtol=1e-6)


def test_fourier_features_are_not_trained():
  _, variables, _ = made(fourier_features=6, fourier_scale=3.0)
  frequencies = variables["constants"]["frequencies"]
  assert frequencies.shape == (2, 6) and 1 < np.std(frequencies) < 5
  assert variables["params"]["Dense_0"]["kernel"].shape == (12, 64)


def test_starts_have_their_bounds():
  kernel = lambda layer, **fields: np.abs(made(**fields)[1]["params"][layer]["kernel"]).max()
  sizes = dict(hidden_dims=(400, 400))
  assert 0.95 / np.sqrt(2) < kernel("Dense_0", **sizes) < 1 / np.sqrt(2)
  assert 0.95 / 2 < kernel("Dense_0", start="siren", **sizes) < 1 / 2
  assert 0.95 * np.sqrt(6 / 400) < kernel("Dense_1", start="siren", **sizes) < np.sqrt(6 / 400)
  biases = made(start="glorot", **sizes)[1]["params"]["Dense_0"]["bias"]
  assert not biases.any()


def test_omega_multiplies_the_first_layer():
  _, variables, net = made(activation="sine", omega=30.0)
  x = np.array([[0.2, 0.7]], np.float32)
  inner = x @ variables["params"]["Dense_0"]["kernel"] + variables["params"]["Dense_0"]["bias"]
  last = variables["params"]["Dense_1"]
  expected = np.sin(30 * inner) @ last["kernel"] + last["bias"]
  np.testing.assert_allclose(net(x), expected, atol=1e-5)
