"""Time and memory of a Gauss-Newton step from the rows of layers, beside one with an explicit Jacobian.

Both solve the same equation in float32: residuals are Laplacians of a tanh net with two hidden
layers at so many points, and J J^T is inverted with a damping. One takes J from gradients of all
residuals, `vmap` over `grad`; the other is `optim.gauss_newton`, which takes J J^T from rows, and
of a layer where it is cheaper its part of J. Width, points and the dimension of the Laplacian,
which decides on uses, vary one at a time. Memory is that of temporaries, as XLA plans it.
"""

import functools
import statistics
from typing import Any, Callable, NamedTuple

from absl import flags
import jax
import jax.numpy as jnp

from benchmarks import timing
from benchmarks.uses import forward_over_reverse, initial, net
from mixer_jax import optim

DAMPING = 1e-3


class Setting(NamedTuple):
  width: int = 128
  points: int = 512
  dimension: int = 2


SETTINGS = [
  *(Setting(width=n) for n in (32, 128, 512)),
  *(Setting(points=n) for n in (128, 2048)),
  *(Setting(dimension=n) for n in (1, 5, 10)),
]


class Problem(NamedTuple):
  """A problem, and both updates: functions of (params, points)."""

  params: Any
  points: jax.Array
  updates: dict[str, Callable]
  uses: int


def problem(setting: Setting) -> Problem:
  params = initial((setting.dimension, setting.width, setting.width, 1), 0)
  points = jax.random.uniform(jax.random.key(1), (setting.points, setting.dimension))
  residual = lambda p, x: forward_over_reverse(functools.partial(net, p), x) - 1.0
  predict = lambda p, xs: jax.vmap(lambda x: residual(p, x))(xs)[:, None]
  curvature = optim.Curvature(predict, params, points, likelihood=(0.5, "normal"))
  tx = optim.gauss_newton(curvature, damping=DAMPING)

  def from_layers(params, points):
    state = tx.init(params)._replace(count=1)  # the first update compares gradients
    return tx.update(params, state, params, batch=points)[0]

  def from_jacobian(params, points):
    flat, back = jax.flatten_util.ravel_pytree(params)
    own = lambda flat, x: residual(back(flat), x)
    r = jax.vmap(own, (None, 0))(flat, points) * len(points) ** -0.5
    j = jax.vmap(jax.grad(own), (None, 0))(flat, points) * len(points) ** -0.5
    matrix = j @ j.T + DAMPING * jnp.eye(len(r))
    return back(-j.T @ jax.scipy.linalg.solve(matrix, r, assume_a="pos"))

  uses = max(block.uses for block in curvature.blocks)
  updates = {"layers": from_layers, "Jacobian": from_jacobian}
  return Problem(params, points, updates, uses)


def measured(own: Problem, rounds: int) -> dict[str, tuple[float, float]]:
  """Seconds, and MiB of temporaries, of each update."""
  given = own.params, own.points
  compiled = {name: jax.jit(f).lower(*given).compile() for name, f in own.updates.items()}
  calls = {name: lambda f=f: jax.block_until_ready(f(*given)) for name, f in compiled.items()}
  seconds = timing.take_turns(calls, rounds)
  bytes_of = lambda f: f.memory_analysis().temp_size_in_bytes
  return {n: (statistics.median(seconds[n]), bytes_of(f) / 2**20) for n, f in compiled.items()}


def main(args: flags.FlagValues) -> None:
  """Prints a table."""
  print(
    "| width | points | dimension | uses | parameters | layers, s | Jacobian, s | layers, MiB | Jacobian, MiB |"
  )
  print("| --: " * 9 + "|")
  for setting in SETTINGS:
    own = problem(setting)
    found = measured(own, args.rounds)
    count = sum(x.size for x in jax.tree.leaves(own.params))
    (s, m), (t, n) = found["layers"], found["Jacobian"]
    head = " | ".join(f"{x:,}" for x in (*setting, own.uses, count))
    print(f"| {head} | {s:.3f} | {t:.3f} | {m:,.1f} | {n:,.1f} |", flush=True)
