"""Angles between the updates of optimizers on the same gradients, and how long and where they are.

One run is trained by its own optimizer. The others see its parameters, batches and gradients, keep
their own states, and say how they would go on. Weight decay is off, as it is no part of a direction.
"""

import dataclasses
import functools
from typing import Any, Mapping, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import steps
from mixer_jax import config as config_lib
from mixer_jax import experiment
from mixer_jax.errors import UserError
from mixer_jax.experiment import Experiment
from mixer_jax.models import LAYER_KINDS
from mixer_jax.optim import path_name
from mixer_jax.paths import user_path
from mixer_jax.report import figures
from mixer_jax.runtime import cli, devices
from mixer_jax.training import step as step_lib
from mixer_jax.training.state import init_state

_PERIODS = dict(factor_period=10, basis_period=20)
_SHAMPOO = dict(name="shampoo", basis_period=20)
_KFAC = dict(name="kfac", norm_constraint=1e30)  # none: lengths are those of K-FAC itself
# One optimizer's fields, or those of two for `graft`: lengths, directions.
OPTIMIZERS = {
  "SGD": dict(name="sgd"),
  "Adam": dict(name="adamw"),
  "Muon": dict(name="muon"),
  "Shampoo": _SHAMPOO,
  "Shampoo, Adam's\nlengths": (dict(name="adamw"), _SHAMPOO),
  "Shampoo,\ncorrected": dict(corrected=True, **_SHAMPOO),
  "SOAP": dict(name="soap", basis_period=20),
  "K-FAC": _KFAC,
  "EK-FAC": dict(eigenvalues="batch", **_KFAC),
  "Adam in\nK-FAC's basis": dict(name="kfac_adam", **_PERIODS),
  "Muon in\nK-FAC's metric": dict(name="kfac_muon", **_PERIODS),
}
_RATE = 1e-3


class Compared(NamedTuple):
  """Means over steps."""

  cosines: np.ndarray  # between the updates of each two optimizers, [optimizers, optimizers]
  # of the squared length of an update, by the kind of layer, each [optimizers]
  shares: Mapping[str, np.ndarray]
  lengths: np.ndarray  # of the updates at a rate of 1, [optimizers]


def compare(run: Experiment, num_steps: int) -> Compared:
  """Follows the run for so many steps; the last third of them counts."""
  gradient = jax.jit(functools.partial(_gradient, run))
  optimizers = [_other(run, fields) for fields in OPTIMIZERS.values()]
  advance, lead = jax.jit(functools.partial(step_lib.update, run)), init_state(run)
  updates = [jax.jit(tx.update) for tx in optimizers]
  states = [jax.jit(tx.init)(lead.params) for tx in optimizers]
  measure, found = jax.jit(functools.partial(_measured, run)), []
  for step, batch in zip(range(num_steps), steps.batches(run)):
    grads, extra = gradient(lead, batch)
    results = [f(grads, s, lead.params, **extra) for f, s in zip(updates, states)]
    others, states = zip(*results)
    if step >= num_steps - max(num_steps // 3, 1):
      found.append(jax.device_get(measure(others)))
    lead, _ = advance(lead, batch)
  return jax.tree.map(lambda *x: np.mean(x, axis=0), *found)


def _gradient(run: Experiment, state: Any, batch: Any) -> tuple[Any, Mapping[str, Any]]:
  """The gradient of a batch, and the extra arguments of an update."""
  _, loss_key, target_key = step_lib.step_keys(state)
  others = {name: x for name, x in state.variables.items() if name in run.variable_shapes}
  others.pop("params")

  def loss(params):
    total, _ = run.task.loss({**others, "params": params}, batch, loss_key)
    return total.value()

  extra = dict(batch=(batch, others), rng=target_key, model_params=state.params)
  return jax.grad(loss)(state.params), extra


def _other(run: Experiment, fields: Any) -> optax.GradientTransformationExtraArgs:
  """An optimizer of the run's problem."""
  config = run.config.copy_and_resolve_references()
  one = lambda name, **rest: config_lib.optimizer(name, _RATE, weight_decay=0.0, **rest)
  pair = isinstance(fields, tuple)
  config.optimizer = config_lib.grafted(*(one(**f) for f in fields)) if pair else one(**fields)
  return dataclasses.replace(run, config=config).optimizer


def _measured(run: Experiment, updates: list[Any]) -> Compared:
  rows = jnp.stack([jnp.concatenate([x.ravel() for x in jax.tree.leaves(u)]) for u in updates])
  lengths = jnp.linalg.norm(rows, axis=1)
  rows = rows / lengths[:, None]
  kinds: dict[str, Any] = {}
  for leaves in zip(*map(jax.tree_util.tree_leaves_with_path, updates)):
    kind = run.task.layer_kind(path_name(leaves[0][0]))
    squares = jnp.stack([jnp.sum(jnp.square(x)) for _, x in leaves])
    kinds[kind] = kinds.get(kind, 0.0) + squares
  total = sum(kinds.values())
  shares = {kind: squares / total for kind, squares in kinds.items()}
  return Compared(rows @ rows.T, shares, lengths / _RATE)


def draw(found: Compared) -> Any:
  """A figure: the cosines as a matrix, the shares of kinds of layers and the lengths as bars."""
  names, number = list(OPTIMIZERS), len(OPTIMIZERS)
  figure, ((matrix, bars, lengths),) = figures.panels(1, 3, (16, 6), width_ratios=(1.3, 1, 0.6))
  matrix.imshow(found.cosines, vmin=-1, vmax=1, cmap="RdBu_r")
  matrix.set_xticks(range(number), names, rotation=45, ha="right")
  matrix.set_yticks(range(number), names)
  for i, j in np.ndindex(number, number):
    dark = abs(found.cosines[i, j]) > 0.6
    text = dict(ha="center", va="center", fontsize=8, color="white" if dark else "black")
    matrix.text(j, i, f"{found.cosines[i, j]:.2f}", **text)
  matrix.set_title("cosine between updates")
  left = np.zeros(number)
  for kind in (k for k in LAYER_KINDS if k in found.shares):
    bars.barh(range(number), found.shares[kind], left=left, label=kind.replace("_", " "))
    left += found.shares[kind]
  bars.set_yticks(range(number), names)
  bars.invert_yaxis()
  bars.set(xlim=(0, 1), title="share of the squared length")
  bars.legend(loc="upper center", bbox_to_anchor=(0.5, -0.06), ncols=3)
  lengths.barh(range(number), found.lengths, color="grey")
  lengths.set_yticks(range(number), [""] * number)
  lengths.invert_yaxis()
  lengths.set(xscale="log", title="length at a rate of 1")
  return figure


def main(options: Any) -> None:
  config = cli.checked_config(options.config)
  if options.out and not options.out.endswith(".png"):
    raise UserError(f"--out is {options.out!r}; the picture is a .png")
  devices.print_line()
  found = compare(experiment.build(config), options.steps)
  print(f"{steps.title(config)}, led by {config.optimizer.name}")
  names = [name.replace("\n", " ") for name in OPTIMIZERS]
  for name, row in zip(names, found.cosines):
    print(f"{name:22}" + "".join(f"{value:7.3f}" for value in row))
  for kind, shares in found.shares.items():
    print(f"{kind:22}" + "".join(f"{value:7.3f}" for value in shares))
  print(f"{'length at a rate of 1':22}" + "".join(f"{value:7.3g}" for value in found.lengths))
  if options.out:
    print(figures.save(draw(found), user_path(options.out)))
