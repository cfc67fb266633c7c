"""Inversions shared by the devices of a mesh."""

import collections
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixer_jax.optim import algebra, spread
from mixer_jax.optim.curvature.blocks import Kronecker

SIZES = {"stem": (5, 4), "block": (9, 17), "head": (17, 3)}


def factors():
  rng = np.random.default_rng(0)

  def factor(size):
    rows = rng.normal(size=(2 * size, size)).astype(np.float32)
    return jnp.asarray(rows.T @ rows / len(rows))

  return {name: Kronecker(*map(factor, sizes)) for name, sizes in SIZES.items()}


def mesh(data, model):
  auto = (jax.sharding.AxisType.Auto,) * 2
  return jax.make_mesh(
    (data, model), ("data", "model"), auto, devices=jax.devices()[: data * model]
  )


def damped(factors, mesh=None):
  return algebra.factored_inverses(factors, 0.1, mesh)


@pytest.mark.parametrize("shape", [(2, 2), (8, 1)], ids=str)
@pytest.mark.parametrize(
  "inverses", [algebra.eigendecompositions, damped], ids=["exact", "factored"]
)
@pytest.mark.first(1)
def test_shared_inversions_equal_those_of_one_device(inverses, shape):
  alone = jax.jit(inverses)(factors())
  shared = jax.jit(lambda f: inverses(f, mesh(*shape)))(factors())
  jax.tree.map(np.testing.assert_array_equal, shared, alone)


def test_each_matrix_is_inverted_once():
  """Counted by calls from inside the compiled program."""
  counts, lock = collections.Counter(), threading.Lock()

  def count(size):
    with lock:
      counts[int(size)] += 1

  def invert(matrix):
    jax.debug.callback(count, len(matrix))
    return jnp.linalg.inv(matrix)

  jax.block_until_ready(jax.jit(lambda f: spread.of_each_matrix(invert, f, mesh(4, 2)))(factors()))
  jax.effects_barrier()
  assert counts == {5: 1, 4: 1, 9: 1, 17: 2, 3: 1}


@pytest.mark.parametrize("layers", [23, 24])
def test_many_matrices_of_one_size_are_inverted_as_a_stack(layers):
  """The inverses of NumPy; from 48 matrices on in one call of a CPU's program, which compiles sooner."""
  rows = np.random.default_rng(0).normal(size=(2, layers, 6, 3))
  a, g = np.einsum("snia,snib->snab", rows, rows)
  given = {"many": Kronecker(jnp.float32(a), jnp.float32(g))}
  program = jax.jit(damped).lower(given).compile()
  calls = program.as_text().count('custom_call_target="lapack_spotrf')
  assert calls == (1 if layers == 24 else 46)
  pi = np.sqrt(np.trace(a, axis1=1, axis2=2) / np.trace(g, axis1=1, axis2=2))[:, None, None]
  shifts = 0.1**0.5 * pi * np.eye(3), 0.1**0.5 / pi * np.eye(3)
  for found, factor, shift in zip(program(given)["many"], (a, g), shifts):
    np.testing.assert_allclose(found, np.linalg.inv(factor + shift), rtol=1e-4, atol=1e-5)


def test_shares_are_balanced():
  # Sizes of a Mixer-B/16 with a head of 10: of 12 blocks, stem and head.
  sizes = [197, 384, 385, 196, 769, 3072, 3073, 768] * 12 + [769, 768, 769, 10]
  shares = spread.share_out(sizes, 8)
  assert sorted(sum(shares, [])) == list(range(len(sizes)))
  loads = [sum(sizes[i] ** 3 for i in share) for share in shares]
  assert max(loads) < 1.01 * sum(loads) / 8
  assert spread.share_out([3, 5], 4) == [[1], [0], []]


@pytest.mark.parametrize("shape", [None, (2, 2), (8, 1)], ids=str)
def test_stacks_of_nearly_one_size_have_the_inverses_of_each(shape):
  """By products; sizes 64 and 65 are made alike, and devices share the stacks."""
  rng = np.random.default_rng(0)
  rows = {size: rng.normal(size=(3 * size, size)).astype(np.float32) for size in (64, 65, 9)}
  moment = {size: jnp.asarray(x.T @ x / len(x)) for size, x in rows.items()}
  given = {"a": Kronecker(moment[64], moment[65]), "b": Kronecker(moment[9], moment[64])}
  where = shape and mesh(*shape)
  inverses = lambda f: algebra.factored_inverses(f, 0.01, where, "products")
  found = jax.jit(inverses)(given)
  wanted = jax.jit(lambda f: algebra.factored_inverses(f, 0.01, None, "library"))(given)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=3e-5, rtol=3e-5), found, wanted)


@pytest.mark.parametrize("scale", [1.0, 1e-25, 1e25])
def test_bases_of_padded_matrices_are_their_own(scale):
  """Also of one without full rank, whose eigenvalues of 0 must not mix with the padding."""
  rng = np.random.default_rng(0)
  rows = {size: rng.normal(size=(40, size)) for size in (64, 66)}
  moment = {s: jnp.asarray(scale * x.T @ x / len(x), jnp.float32) for s, x in rows.items()}
  given = {"a": Kronecker(moment[64], moment[66])}
  eye = lambda d: algebra.Eigen(jnp.ones(d), jnp.eye(d))
  start, how = {"a": (eye(64), eye(66))}, algebra.Decomposition(linear_algebra="products")
  turn = jax.jit(lambda f, b, count: algebra.renewed_bases(f, b, count, how)[0])
  found = start
  for count in range(200):
    found = turn(given, found, count)
  for size, eigen in zip((64, 66), found["a"]):
    exact = np.linalg.eigvalsh(np.float64(moment[size]) / scale)[::-1]
    np.testing.assert_allclose(eigen.values[:40] / scale, exact[:40], rtol=2e-2)
    np.testing.assert_allclose(eigen.values[40:] / scale, 0, atol=1e-5)
    np.testing.assert_allclose(eigen.vectors.T @ eigen.vectors, np.eye(size), atol=1e-5)
