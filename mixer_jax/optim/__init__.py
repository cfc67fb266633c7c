"""Optimizers as optax transforms, and a chain built from a config.

Import them from here and use them with any optax chain and any model, inside or outside this
project. K-FAC and its family take Linen models; docs/kfac.md lists their layers.
"""

import dataclasses
import inspect
from typing import Annotated, Any, Callable, NamedTuple

import jax
import ml_collections
import optax

from mixer_jax import options
from mixer_jax.errors import UserError
from mixer_jax.optim import schedules, step_norms
from mixer_jax.optim.curvature_blocks import path_name
from mixer_jax.optim.factors import every_nth, kfac_blocks, kfac_factors
from mixer_jax.optim.first_order import adagrad, adam, adamw, lamb, muon, sgd
from mixer_jax.optim.graft import GraftState, graft
from mixer_jax.optim.kfac import kfac
from mixer_jax.optim.kfac_basis import (
  kfac_adam,
  kfac_muon,
  scale_by_kfac_adam,
  scale_by_kfac_muon,
)
from mixer_jax.optim.layer_calls import stacked_axes
from mixer_jax.optim.likelihoods import Likelihood
from mixer_jax.optim.per_example import per_example_grads
from mixer_jax.optim.preconditioner import ScaleByKfacState, scale_by_kfac
from mixer_jax.optim.relayout import Layout, relayout
from mixer_jax.optim.soap import scale_by_shampoo, scale_by_soap, shampoo, soap

OPTIMIZERS = {
  "sgd": sgd,
  "adam": adam,
  "adamw": adamw,
  "lamb": lamb,
  "adagrad": adagrad,
  "muon": muon,
  "shampoo": shampoo,
  "soap": soap,
  "kfac": kfac,
  "kfac_adam": kfac_adam,
  "kfac_muon": kfac_muon,
}
# Optimizers that treat a tensor as a whole; all others work element by element.
_BY_TENSOR = ("lamb", "muon", "shampoo", "soap", "kfac", "kfac_adam", "kfac_muon", "graft")


@dataclasses.dataclass(frozen=True)
class _General:
  """Options of every optimizer but `graft`."""

  learning_rate: Annotated[float, options.Option("learning rate", 0)] = 1e-3
  clip_norm: Annotated[float, options.Option("largest global norm of the gradient; 0: any", 0)] = (
    0.0
  )
  decay: Annotated[
    str, options.Option("parameters that weight decay applies to", choices=("kernels", "all"))
  ] = "kernels"


_GENERAL = options.of(_General)


class Problem(NamedTuple):
  """The task as an optimizer sees it, each layer's parameters apart.

  Attributes:
    predict: maps (params, batch) to (outputs, targets).
    params: the parameters, or their shapes.
    batch: an example batch, or its shapes.
    likelihood: see `scale_by_kfac`, a name or another of its forms.
    layout: from the parameters that are trained to `params`; None: they are the same.
    mesh: the devices of the training step, or None.
    part: see `scale_by_kfac`.
  """

  predict: Callable[[Any, Any], Any]
  params: Any
  batch: Any
  likelihood: Any
  layout: Layout | None = None
  mesh: jax.sharding.Mesh | None = None
  part: Callable[[Any, int], Any] | None = None


def group(
  name: str, learning_rate: float | None = None, **values: Any
) -> ml_collections.ConfigDict:
  """The part of a config for an optimizer of `OPTIMIZERS`, with options of any of them.

  `check` tells mistakes in it, a missing rate among them.
  """
  config = options.group(OPTIMIZERS, name)
  config.update(options.group(_General, learning_rate=learning_rate))
  config.update(values)
  return config


def check(config: ml_collections.ConfigDict, path: str = "optimizer") -> None:
  """Checks the names and values of an optimizer's options, on both sides of a pair.

  Raises:
    UserError: an unknown optimizer, an option that it does not take, a missing side; `path`
      is the place of the config in a larger one.
  """
  if options.chosen(config, {**OPTIMIZERS, "graft": graft}, path) is not graft:
    options.check(config, OPTIMIZERS, path, _GENERAL)
    return
  for side in step_norms.SIDES:
    if not config.get(side):
      raise UserError(f"{path}.{side} is missing; graft takes two complete optimizer configs")
    check(config[side], f"{path}.{side}")
  rest = {k: v for k, v in config.items() if k not in step_norms.SIDES and v is not None}
  options.check(ml_collections.ConfigDict(rest), {"graft": graft}, path)


def build(
  config: ml_collections.ConfigDict,
  multiplier: schedules.Schedule,
  problem: Problem | None,
  numbers: Any = None,
  decayed: Callable[[str], bool] | None = None,
  decay: schedules.Schedule | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Builds the optimizer that a group of a config describes.

  Args:
    config: `name`, the options of every optimizer (`_General`) and of the named one, None
      for its default; or `name` "graft" with the complete configs `magnitude` and `direction`.
    multiplier: the schedule, see `schedules.Multiplier`.
    problem: the task as K-FAC sees it; None, of an optimizer that needs no model.
    numbers: replace those of the config, see `numbers`; traced values are welcome.
    decayed: whether decay="kernels" applies to the parameter of a path; None: `is_kernel`.
    decay: multiplier of the weight decay by the update count; None: constant.

  Returns:
    A transform that takes `batch` and `rng` as extra arguments.

  Raises:
    UserError: an unknown optimizer, or an option that it does not take; a weight decay of K-FAC, or
      of an optimizer without one, that is not constant; of the transform's `init`, parameters.
  """
  check(config)
  given = _numbers(config) if numbers is None else numbers
  by_tensor = problem and problem.layout and config.name in _BY_TENSOR
  inside = problem and problem._replace(layout=None)
  try:
    if config.name == "graft":
      sides = (
        build(config[s], multiplier, inside, given[s], decayed, decay) for s in step_norms.SIDES
      )
      tx = graft(*sides, **{k: config[k] for k in options.of(graft) if config.get(k) is not None})
    else:
      rate = lambda count: given["learning_rate"] * multiplier(count)
      own = {"weight_decay": _scheduled_decay(config, decay)} if decay else {}
      keywords = _keywords(config, given, inside, decayed or is_kernel)
      tx = OPTIMIZERS[config.name](rate, **keywords | own)
  except (ValueError, ImportError) as e:
    raise UserError(f"optimizer {config.name}: {e}") from e
  if config.get("clip_norm"):
    squares = config.get("eigenvalues") == "batch"
    if config.get("quadratic_model") or config.get("adaptive_damping") or squares:
      use = "eigenvalues=batch" if squares else "a quadratic model"
      raise UserError(f"optimizer {config.name}: {use} needs clip_norm=0")
    tx = optax.chain(optax.clip_by_global_norm(config.clip_norm), tx)
  tx = optax.with_extra_args_support(tx)
  tx = tx._replace(init=_told(tx.init, config.name))
  return relayout(tx, problem.layout) if by_tensor else tx


def _told(init: Callable[[Any], Any], name: str) -> Callable[[Any], Any]:
  """The function of parameters with a UserError for those that the optimizer does not take."""

  def told_init(params):
    try:
      return init(params)
    except ValueError as e:
      raise UserError(f"optimizer {name}: {e}") from e

  return told_init


def _keywords(config, given, problem, decayed):
  """The keywords of an optimizer's function, but for its learning rate."""
  mask = lambda params: jax.tree_util.tree_map_with_path(lambda k, _: decayed(path_name(k)), params)
  keywords = {k: v for k, v in options.given(config).items() if k not in _GENERAL}
  keywords |= {k: v for k, v in given.items() if k != "learning_rate"}
  keywords["decay_mask"] = mask if config.decay == "kernels" else None
  takes = inspect.signature(OPTIMIZERS[config.name]).parameters
  if "predict" in takes:
    if problem is None:
      raise ValueError("problem is None; allowed: a Problem, whose layers it sees")
    keywords |= problem._asdict()
    keywords.pop("layout")
  elif problem and "mesh" in takes:
    keywords["mesh"] = problem.mesh
  if problem and "stacked" in takes:
    keywords["stacked"] = stacked_axes(problem.predict, problem.params, problem.batch)
  return keywords


def _scheduled_decay(config, decay):
  if config.name == "kfac" or "weight_decay" not in options.of(OPTIMIZERS[config.name]):
    raise UserError(
      f"schedule.decay_end: the weight decay of {config.name} is constant; set it to 1"
    )
  most = options.value(OPTIMIZERS, config, "weight_decay")
  return lambda count: most * decay(count)


def numbers(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """Learning rates and dampings: runs that differ in these alone share a compiled program."""
  check(config)
  return _numbers(config)


def _numbers(config):
  if config.name == "graft":
    return {side: _numbers(config[side]) for side in step_norms.SIDES}
  found = {"learning_rate": config.learning_rate}
  if "damping" in options.of(OPTIMIZERS[config.name]):
    found["damping"] = options.value(OPTIMIZERS, config, "damping")
  return found


def learning_rate(
  config: ml_collections.ConfigDict, multiplier: schedules.Schedule
) -> schedules.Schedule:
  """The rate applied at an update; of a grafted pair, that of the magnitude."""
  while config.name == "graft":
    config = config.magnitude
  return lambda count: config.learning_rate * multiplier(count)


def kfac_sides(config: ml_collections.ConfigDict) -> list[ml_collections.ConfigDict]:
  """The K-FAC parts of an optimizer's config, of a grafted pair maybe both."""
  if config.name == "graft":
    return [found for side in step_norms.SIDES for found in kfac_sides(config[side])]
  return [config] if config.name in ("kfac", "kfac_adam", "kfac_muon") else []


def is_kernel(path: str) -> bool:
  """Whether a parameter is a kernel, by its last name."""
  return path.rpartition("/")[2] == "kernel"


def table() -> str:
  """The options of all optimizers as a Markdown table."""
  head, line, name, *rest = options.table(OPTIMIZERS | {"graft": graft}, "optimizer.").splitlines()
  row = lambda name, *cells: f"| `optimizer.{name}` | {' | '.join(cells)} |"
  every, side = "all but graft", ("graft", "", "a complete optimizer")
  general = [row(k, every, f"`{o.default!r}`", o.allowed, o.help) for k, o in _GENERAL.items()]
  sides = [row(name, *side, f"gives the {name}") for name in step_norms.SIDES]
  return "\n".join((head, line, name, *general, *rest, *sides))
