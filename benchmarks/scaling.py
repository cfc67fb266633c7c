"""A step on many devices: a model from operations and bytes. Nothing is measured here.

Operations are those of `flops.step_costs`, bytes those of float32 parameters, factors
and inverses; rates are a cluster's. Nothing overlaps in this model, so that its times are
upper bounds.
"""

import math
from typing import Any, Iterator, NamedTuple, Sequence

import jax
import jax.numpy as jnp

from benchmarks import flops, optimizers, tables
from mixer_jax import models, optim
from mixer_jax.optim import Block, spread
from mixer_jax.optim.curvature import library

# A run of the Mixer paper: ImageNet-21k's images, epochs, global batch, classes.
IMAGES, EPOCHS, BATCH_SIZE, CLASSES = 14_197_122, 300, 4096, 21_841
_FLOAT = 4  # bytes of a parameter, a factor or an inverse
_HALF = 2


class Cluster(NamedTuple):
  """Rates of one GPU and its links, per second."""

  products: float  # operations in bfloat16 matrix products
  precise: float  # operations in TF32 matrix products, of factors and preconditioning
  eigh: float  # operations in a symmetric eigendecomposition, of 9 n^3
  inside: float  # bytes a GPU sends to those of its node
  outside: float  # bytes a GPU sends to other nodes
  node: int = 8  # GPUs of a node
  latency: float = 10e-6  # seconds of a message


# The maker's figures of an H200 (989 and 494 TFLOP/s, NVLink 450 GB/s one way), half
# of the products and 80% of the links taken as reached; a 400 Gbit/s link for each
# GPU and 1 TFLOP/s in eigendecompositions are assumptions.
H200 = Cluster(0.5 * 989e12, 0.5 * 494e12, 1e12, 0.8 * 450e9, 0.8 * 50e9)


class Parts(NamedTuple):
  """Seconds a step, averaged over K-FAC's periods."""

  gradient: float  # forward and backward pass
  gradient_sum: float  # all-reduce of the gradient
  factors: float = 0.0  # renewing them
  factor_sum: float = 0.0  # their all-reduce
  inverses: float = 0.0  # renewing them, on the device with the most work
  inverse_exchange: float = 0.0  # sending each to all devices
  preconditioning: float = 0.0  # of all layers, on every device


def parts(
  blocks: Sequence[Block],
  cluster: Cluster,
  devices: int,
  batch_size: int,
  periods: tuple[int, int] | None = None,
) -> Parts:
  """The parts of a step on a cluster.

  Args:
    blocks: of a `Curvature`.
    cluster: rates.
    devices: GPUs that share the batch.
    batch_size: images of a step, on all of them.
    periods: of factors and inverses; None: a first-order optimizer.
  """
  costs = flops.step_costs(blocks, batch_size)
  gradient = costs.gradient / devices / cluster.products
  sums = {k: all_reduce(size, cluster, devices) for k, size in payloads(blocks).items()}
  if periods is None:
    return Parts(gradient, sums["gradient"])
  factor_period, inverse_period = periods
  sizes = _sizes(blocks)
  shares = spread.share_out(sizes, devices)
  most = max(sum(flops.EIGH * sizes[i] ** 3 for i in share) for share in shares)
  # A pass like that of the gradient, and second moments in float32.
  moments = (costs.factors - costs.gradient) / devices / cluster.precise
  return Parts(
    gradient,
    sums["gradient"],
    (gradient + moments) / factor_period,
    sums["factors"] / factor_period,
    most / cluster.eigh / inverse_period,
    sums["inverses"] / inverse_period,
    costs.preconditioning / cluster.precise,
  )


def payloads(blocks: Sequence[Block]) -> dict[str, int]:
  """Bytes that a step sums over devices: its gradient and, where they are renewed, factors and inverses.

  Of layers that compute in bfloat16, all but the head, the kernels' gradients are summed in bfloat16.
  """
  total = sum(math.prod(shape) for block in blocks for shape in block.shapes)
  kernels = sum(math.prod(b.shapes[0]) for b in blocks if b.kind == "kronecker")
  sizes = _sizes(blocks)
  return {
    "gradient": _FLOAT * (total - kernels) + _HALF * kernels,
    "factors": _FLOAT * sum(map(library.blocks().moment_numbers, sizes)),
    "inverses": _FLOAT * sum(size * size for size in sizes),
  }


def _sizes(blocks: Sequence[Block]) -> list[int]:
  """The rows of all factors."""
  own = [block for block in blocks if block.kind == "kronecker"]
  return [size for b in own for size in b.factor_sizes * math.prod(b.stacked)]


def shared_preconditioning(blocks: Sequence[Block], cluster: Cluster, devices: int) -> float:
  """Seconds of another way, not taken: one device preconditions a layer and sends it to all."""
  work = [flops.step_costs([block], 1).preconditioning for block in blocks]
  most = max(sum(work) / devices, *work)  # at best
  total = sum(math.prod(shape) for block in blocks for shape in block.shapes)
  return most / cluster.precise + all_reduce(_FLOAT * total, cluster, devices)


def all_reduce(size: float, cluster: Cluster, devices: int) -> float:
  """Seconds to sum `size` bytes: scattered in the node, summed between nodes, gathered."""
  inner = min(devices, cluster.node)
  nodes = -(-devices // cluster.node)
  inside = 2 * (inner - 1) / inner * size / cluster.inside
  outside = 2 * (nodes - 1) / nodes * size / inner / cluster.outside
  return inside + outside + 2 * math.log2(max(devices, 1)) * cluster.latency


def memory(blocks: Sequence[Block]) -> dict[str, int]:
  """Bytes on every device without a model axis: parameters with momentum, K-FAC's state."""
  total = sum(math.prod(shape) for block in blocks for shape in block.shapes)
  sizes = _sizes(blocks)
  squares = sum(size * size for size in sizes)
  return {
    "parameters and momentum": 2 * _FLOAT * total,
    "factors": _FLOAT * squares,
    "inverses": _FLOAT * (squares + sum(sizes)),
  }


def blocks_of(name: str) -> Sequence[Block]:
  """The curvature blocks of a model with ImageNet-21k's head, which has none."""
  side = models.image_size(name)
  model = models.build(name, CLASSES)
  images = jax.ShapeDtypeStruct((2, side, side, 3), jnp.float32)
  params = jax.eval_shape(model.init, jax.random.key(0), images)["params"]
  predict = lambda params, images: model.apply({"params": params}, images)
  return optim.Curvature(predict, params, images, unpreconditioned="^head/").blocks


_PARTS = tuple(field.replace("_", " ") for field in Parts._fields)
TITLES = ("GPUs", *_PARTS, "(shared)", "SGD h", "K-FAC h", "ratio")


def rows(
  blocks: Sequence[Block], numbers: Sequence[int], cluster: Cluster, periods: tuple[int, int]
) -> Iterator[list[str]]:
  """By number of GPUs: milliseconds of the parts of a step, hours of a run, K-FAC over SGD."""
  steps = IMAGES * EPOCHS / BATCH_SIZE
  for devices in numbers:
    kfac = parts(blocks, cluster, devices, BATCH_SIZE, periods)
    first_order = parts(blocks, cluster, devices, BATCH_SIZE)
    hours = [sum(p) * steps / 3600 for p in (first_order, kfac)]
    shared = shared_preconditioning(blocks, cluster, devices)
    milliseconds = [f"{1e3 * seconds:.3g}" for seconds in (*kfac, shared)]
    over_sgd = f"{hours[1] / hours[0]:.2f}"
    yield [str(devices), *milliseconds, *(f"{h:.3g}" for h in hours), over_sgd]


def main(options: Any) -> None:
  periods = tuple(optimizers.PERIODS.values())
  print(
    f"a model, not a measurement: ImageNet-21k, {IMAGES:,} images, {EPOCHS} epochs, batch"
    f" {BATCH_SIZE}; milliseconds a step on H200s ({H200}); K-FAC without the head, periods"
    f" {periods}"
  )
  for name in options.models or ["mixer_b16", "mixer_l16"]:
    blocks = blocks_of(name)
    print(f"\n{name}\n")
    tables.show(TITLES, rows(blocks, (1, 8, 64, 256, 1024), H200, periods), texts=0)
    for kind, size in memory(blocks).items():
      print(f"{kind}: {size / 2**30:.2f} GiB")
