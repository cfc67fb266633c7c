"""Costs that are read from compiled programs, against closed forms."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import pytest

from mixer_jax.optim.curvature import library
from mixer_jax.planning import operations


def read(function, *shapes, dtype=jnp.float32, shardings=None):
  arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
  if shardings:
    arguments = [
      jax.ShapeDtypeStruct(a.shape, dtype, sharding=where) for a, where in zip(arguments, shardings)
    ]
  return operations.read(jax.jit(function).lower(*arguments).compile().as_text())


def products(program, scope=None):
  own = [o for o in program.operations if scope in (None, o.scope)]
  return sum(o.times * o.products for o in own)


def conv(stride, padding):
  dims = ("NHWC", "HWIO", "NHWC")
  return lambda x, w: jax.lax.conv_general_dilated(x, w, stride, padding, dimension_numbers=dims)


@pytest.mark.parametrize(
  "function, shapes, wanted",
  [
    (jnp.matmul, [(8, 16), (16, 32)], 2 * 8 * 16 * 32),
    (jnp.matmul, [(5, 8, 16), (5, 16, 32)], 5 * 2 * 8 * 16 * 32),
    (lambda x, w: jnp.tanh(x @ w) @ w.T, [(8, 16), (16, 32)], 4 * 8 * 16 * 32),
    # Every place of the window lies on the image.
    (conv((4, 4), "VALID"), [(2, 16, 16, 3), (4, 4, 3, 7)], 2 * 2 * 4 * 4 * 7 * 4 * 4 * 3),
    # Three rows in each of the two axes, but two at a border.
    (conv((1, 1), "SAME"), [(2, 8, 8, 3), (3, 3, 3, 5)], 2 * 2 * 5 * 3 * (3 * 8 - 2) ** 2),
    (lambda x: jnp.linalg.eigh(x)[1], [(3, 20, 20)], 3 * 9 * 20**3),
  ],
)
def test_operations_of_products(function, shapes, wanted):
  assert products(read(function, *shapes)) == wanted


def test_a_loop_counts_by_its_turns_and_an_open_one_once():
  turn = lambda x, _: (jnp.tanh(x @ x), None)
  closed = read(lambda x: jax.lax.scan(turn, x, None, length=7)[0], (16, 16))
  assert products(closed) == 7 * 2 * 16**3 and closed.open_loops == 0
  grows = lambda x: jax.lax.while_loop(lambda x: x.sum() < 5, lambda x: x @ x, x)
  ends_by_data = read(grows, (16, 16))
  assert products(ends_by_data) == 2 * 16**3 and ends_by_data.open_loops == 1


def test_a_branch_that_renews_is_apart_and_of_others_the_costliest_counts():
  def step(x, i):
    def renewed():
      with jax.named_scope("factors"):
        return x @ x @ x

    x = x @ x + jax.lax.cond(i % 10 == 0, renewed, lambda: x)
    return jax.lax.switch(i % 3, [lambda: x, lambda: x @ x @ x @ x, lambda: x @ x]) @ x

  text = jax.jit(step).lower(jnp.ones((16, 16)), 0).compile().as_text()
  program, one = operations.read(text), 2 * 16**3
  assert products(program, "factors") == 2 * one
  assert products(program, "plain") == (1 + 3 + 1) * one


@pytest.mark.parametrize(
  "dtype, asked, wanted",
  [
    (jnp.float32, "default", "float32"),
    (jnp.float32, "highest", "highest"),
    (jnp.float64, "default", "float64"),
  ],
)
def test_precision(dtype, asked, wanted):
  with jax.enable_x64(True), jax.default_matmul_precision(asked):
    program = read(jnp.matmul, (64, 32), (32, 16), dtype=dtype)
  assert {o.precision for o in program.operations if o.products} == {wanted}


def test_bytes_of_an_elementwise_program():
  program = read(lambda x, y: jnp.exp(x) * y, (1000,), (1000,))
  assert sum(o.moved for o in program.operations) == 3 * 4000


def test_a_slice_of_a_large_array_moves_itself_alone():
  rows = lambda x: jax.lax.scan(lambda c, row: (c + jnp.sin(row), None), x[0], x)[0]
  program = read(rows, (1000, 256))
  moved = sum(o.times * o.moved for o in program.operations)
  assert 2 * 1000 * 1024 < moved < 6 * 1000 * 1024


@pytest.mark.parametrize("devices", [2, 8])
def test_collectives_of_a_data_parallel_gradient(devices):
  mesh = jax.make_mesh((devices,), ("data",), (AxisType.Auto,), devices=jax.devices()[:devices])
  place = lambda *spec: NamedSharding(mesh, PartitionSpec(*spec))
  grad = jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 2))
  program = read(grad, (32, 16), (64, 32), shardings=[place(), place("data")])
  [found] = [o for o in program.operations if o.collective]
  assert found.collective == "all-reduce" and found.payload == 4 * 32 * 16
  assert found.sent == pytest.approx(2 * (devices - 1) / devices * 4 * 32 * 16)
  # Each device has its share of the batch.
  assert products(program) == 2 * 2 * 64 * 32 * 16 / devices


@pytest.mark.parametrize("width", [600, 1024, 2049])
def test_numbers_of_a_second_moment_are_those_that_are_computed(width):
  """The cost model sends so many for each factor."""
  blocks = library.blocks()
  moments = lambda a: blocks.second_moments(a, a[:, :4], (width, width), (4, 4))[0]
  assert products(read(moments, (8, width))) == 2 * 8 * blocks.moment_numbers(width)


STARTED = """HloModule small, num_partitions=8

%starts (a: f32[2,16,16]) -> (f32[2,16,16], f32[16,16,16]) {
  %a = f32[2,16,16]{2,1,0} parameter(0)
  %gathered = f32[16,16,16]{2,1,0} all-gather(%a), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
  ROOT %started = (f32[2,16,16]{2,1,0}, f32[16,16,16]{2,1,0}) custom-call(%gathered), custom_call_target="AsyncCollectiveStart"
}

%goes_on (b: f32[2,16,16]) -> f32[16,16,16] {
  %b = f32[2,16,16]{2,1,0} parameter(0)
  ROOT %again = f32[16,16,16]{2,1,0} all-gather(%b), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
}

ENTRY %main (x: f32[2,16,16]) -> f32[16,16,16] {
  %x = f32[2,16,16]{2,1,0} parameter(0)
  %first = (f32[2,16,16]{2,1,0}, f32[16,16,16]{2,1,0}) fusion(%x), kind=kCustom, calls=%starts
  %part = f32[2,16,16]{2,1,0} get-tuple-element(%first), index=0
  ROOT %second = f32[16,16,16]{2,1,0} fusion(%part), kind=kOutput, calls=%goes_on
}
"""


def test_a_collective_that_fusions_of_a_tpu_share_counts_once():
  (found,) = [o for o in operations.read(STARTED).operations if o.collective]
  assert (found.collective, found.payload) == ("all-gather", 4 * 16**3)
  assert found.sent == 4 * 16**3 * 7 / 8
