"""How near products of factors come to the exact Gauss-Newton block of a weight used several times.

Under a Laplacian one example reads each weight many times: in the net, in the tangents of forward mode,
in the transposed products of reverse mode. On nets this small the block sum J^T J over points is
formed exactly, in float64. For each layer of a net with one term, the Laplacian of the net, the cosine
(Frobenius) between the block and

  pooled     what the optimizers use: rows of all uses stacked, transposed ones mixed by their traces;
  sum        the sum over uses of A (x) G of each, which is no Kronecker product;
  of sum     the product nearest to that sum;
  best       the product nearest to the block itself (Van Loan and Pitsianis, 1993): no product is nearer.
"""

import dataclasses
import functools
from typing import Any, Callable

import jax
import jax.numpy as jnp
import numpy as np

from mixer_jax import optim
from mixer_jax.optim.curvature import estimation

SIZES = {"2-16-1": (2, 16, 1), "2-16-16-1": (2, 16, 16, 1)}
POINTS = 64


def net(params: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
  """A tanh net of one point x [inputs]; a number."""
  for layer in params[:-1]:
    x = jnp.tanh(x @ layer["w"] + layer["b"])
  return (x @ params[-1]["w"] + params[-1]["b"])[0]


def forward_over_reverse(u: Callable, x: jax.Array) -> jax.Array:
  return jnp.trace(jax.jacfwd(jax.grad(u))(x))


def forward_over_forward(u: Callable, x: jax.Array) -> jax.Array:
  slope = lambda e: lambda y: jax.jvp(u, (y,), (e,))[1]
  return sum(jax.jvp(slope(e), (x,), (e,))[1] for e in jnp.eye(x.size))


def initial(sizes: tuple[int, ...], seed: int) -> list[dict[str, jax.Array]]:
  keys = jax.random.split(jax.random.key(seed), len(sizes))
  draw = lambda key, *shape: jax.random.normal(key, shape) / np.sqrt(shape[0])
  pairs = zip(keys, sizes, sizes[1:])
  return [{"w": draw(k, a, b), "b": 0.1 * draw(k, b)} for k, a, b in pairs]


def cosines(sizes: tuple[int, ...], laplacian: Callable, seed: int) -> dict[str, dict[str, float]]:
  """By layer and way the cosine with the exact block."""
  params = initial(sizes, seed)
  points = jax.random.uniform(jax.random.key(seed + 1), (POINTS, sizes[0]))
  residual = lambda p, x: laplacian(functools.partial(net, p), x)
  predict = lambda p, xs: jax.vmap(lambda x: residual(p, x))(xs)[:, None]
  options = dict(likelihood="normal", estimation="exact", token_averaging="expand")
  curvature = optim.Curvature(predict, params, points, **options)
  pooled = curvature.factors(params, points, jax.random.key(0))
  jacobian = jax.vmap(jax.grad(residual), (None, 0))(params, points)
  found = {}
  for block in curvature.blocks:
    if block.kind != "kronecker":
      continue
    rows = jax.vmap(lambda tree, b=block: b.matrix([_leaf(tree, p) for p in b.paths]))(jacobian)
    exact = np.einsum("nab,ncd->acbd", rows, rows)  # [in, in, out, out]
    parts = _by_use(curvature, block.name, params, points)
    total = sum(_product(a, g) for a, g in parts)
    ways = {
      "pooled": _product(*map(np.asarray, pooled[block.name])),
      "sum": total,
      "of sum": _nearest(total),
      "best": _nearest(exact),
    }
    found[block.name] = {way: _cosine(x, exact) for way, x in ways.items()}
  return found


def _by_use(curvature: Any, name: str, params: Any, points: jax.Array) -> list[Any]:
  """The factors of a layer from each of its uses alone."""
  traced = curvature._traced(points)
  [layer] = [x for x in traced.layers if x.block.name == name]
  parts = []
  for path, tap in traced.taps[0].items():
    if tap.block != name:
      continue
    alone = dataclasses.replace(traced, taps=[{path: tap}])
    own = layer._replace(kinds=(tap.kind,))
    zeros = {name: own.accumulators(None)}
    runs = estimation.forward(alone, jax.tree.leaves(params), points, zeros, [(None, None)])
    key = jax.random.key(0)
    [sums] = estimation.sums(runs, curvature.likelihood, "exact", key, None)
    pair = own.factors(sums[name], runs[0].examples, False)
    parts.append([np.asarray(x) for x in pair])
  return parts


def _leaf(tree: Any, path: str) -> jax.Array:
  for name in path.split("/"):
    tree = tree[int(name) if isinstance(tree, list) else name]
  return tree


def _product(a: np.ndarray, g: np.ndarray) -> np.ndarray:
  return np.einsum("ac,bd->acbd", a, g)


def _nearest(x: np.ndarray) -> np.ndarray:
  """The Kronecker product nearest to x [in, in, out, out]."""
  n, m = x.shape[0], x.shape[2]
  u, s, v = np.linalg.svd(x.reshape(n * n, m * m), full_matrices=False)
  return (s[0] * np.outer(u[:, 0], v[0])).reshape(x.shape)


def _cosine(x: np.ndarray, y: np.ndarray) -> float:
  return float(np.vdot(x, y) / (np.linalg.norm(x) * np.linalg.norm(y)))


def main(_: Any = None) -> None:
  """Prints a table, the mean over three seeds."""
  modes = {
    "forward over reverse": forward_over_reverse,
    "forward over forward": forward_over_forward,
  }
  print("| net | derivative | layer | pooled | sum | of sum | best |")
  print("| :-- | :-- | :-- | --: | --: | --: | --: |")
  with jax.enable_x64(True):
    for sizes in SIZES:
      for mode, laplacian in modes.items():
        seeds = [cosines(SIZES[sizes], laplacian, seed) for seed in range(3)]
        for layer in seeds[0]:
          mean = lambda way, layer=layer: np.mean([s[layer][way] for s in seeds])
          cells = " | ".join(f"{mean(way):.3f}" for way in ("pooled", "sum", "of sum", "best"))
          print(f"| {sizes} | {mode} | {layer} | {cells} |")
