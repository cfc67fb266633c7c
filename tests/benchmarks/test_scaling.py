"""The model of many devices against sums done by hand."""

import jax
import jax.numpy as jnp
import optax
import pytest

from benchmarks import scaling
from mixer_jax import models, optim
from mixer_jax.optim import Block

# One dense layer, 2 inputs and a bias to 4 outputs, 5 tokens.
LAYER = Block(
  "layer", "kronecker", ("layer/kernel", "layer/bias"), ((2, 4), (4,)), (3, 4), tokens=5
)
CLUSTER = scaling.Cluster(
  products=100.0, precise=10.0, eigh=1.0, inside=16.0, outside=2.0, node=4, latency=0.0
)


# Three of them, as a scan has them.
STACK = Block(
  "layer", "kronecker", LAYER.paths, ((3, 2, 4), (3, 4)), (3, 4), stacked=(3,), tokens=5
)


@pytest.mark.parametrize(
  "devices, seconds",
  [
    (1, 0.0),
    (4, 2 * 3 / 4 * 64 / 16),  # a ring in the node
    (8, 2 * 3 / 4 * 64 / 16 + 2 * 1 / 2 * (64 / 4) / 2),  # and a quarter each between two nodes
  ],
)
def test_all_reduce(devices, seconds):
  assert scaling.all_reduce(64, CLUSTER, devices) == pytest.approx(seconds)


def test_parts_of_a_step_on_two_devices():
  found = scaling.parts([LAYER], CLUSTER, devices=2, batch_size=6, periods=(10, 100))
  rows = 6 * 5
  gradient = 6 * rows * 3 * 4 / 2 / 100
  sums = lambda numbers: 2 * 1 / 2 * 4 * numbers / 16
  assert found.gradient == pytest.approx(gradient)
  assert found.gradient_sum == pytest.approx(sums(2 * 4 / 2 + 4))  # kernels in bfloat16
  assert found.factors == pytest.approx((gradient + 2 * rows * (9 + 16) / 2 / 10) / 10)
  assert found.factor_sum == pytest.approx(sums(9 + 16) / 10)
  assert found.inverses == pytest.approx(9 * 4**3 / 100)  # the larger matrix alone
  assert found.inverse_exchange == pytest.approx(sums(9 + 16) / 100)
  assert found.preconditioning == pytest.approx(4 * 3 * 4 * (3 + 4) / 10)
  first_order = scaling.parts([LAYER], CLUSTER, devices=2, batch_size=6)
  assert first_order == (found.gradient, found.gradient_sum, 0, 0, 0, 0, 0)


def test_shared_preconditioning_sends_what_it_saves():
  seconds = scaling.shared_preconditioning([LAYER, LAYER], CLUSTER, devices=2)
  assert seconds == pytest.approx(4 * 3 * 4 * (3 + 4) / 10 + 2 * 1 / 2 * 4 * 2 * 12 / 16)


def test_memory_and_table():
  assert scaling.memory([LAYER]) == {
    "parameters and momentum": 2 * 4 * 12,
    "factors": 4 * 25,
    "inverses": 4 * (25 + 7),
  }
  rows = list(scaling.rows([LAYER], [1, 8], CLUSTER, (10, 100)))
  assert [row[0] for row in rows] == ["1", "8"]
  assert {len(row) for row in rows} == {len(scaling.TITLES)}


def test_a_stack_costs_as_much_as_its_layers():
  for periods in (None, (10, 100)):
    found, expected = (
      scaling.parts(blocks, CLUSTER, 4, 6, periods) for blocks in ([STACK], [LAYER] * 3)
    )
    assert found == pytest.approx(expected)
  assert scaling.memory([STACK]) == scaling.memory([LAYER] * 3)


@pytest.mark.thorough
def test_memory_is_that_of_the_arrays_of_a_state():
  model, images = models.build("mixer_s4", num_classes=10), jnp.zeros((2, 32, 32, 3))
  predict = lambda params, images: model.apply({"params": params}, images)
  params = jax.eval_shape(model.init, jax.random.key(0), images)["params"]
  curvature = optim.Curvature(predict, params, images)
  tx = optim.kfac(1e-2, curvature)
  state = jax.eval_shape(tx.init, params)
  size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
  expected = scaling.memory(curvature.blocks)
  assert size(optax.tree.get(state, "factors")) == expected["factors"]
  assert size(optax.tree.get(state, "inverses")) == expected["inverses"]
  momentum = optax.tree.get(state, "trace")
  assert size((params, momentum)) == expected["parameters and momentum"]


@pytest.mark.thorough
def test_blocks_of_a_model_without_its_head():
  blocks = scaling.blocks_of("mixer_s32")
  assert sum(block.kind == "kronecker" for block in blocks) == 1 + 8 * 4
  assert {block.kind for block in blocks if block.name.startswith("head")} == {"gradient"}
