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
