"""An optimizer from a group of a config."""

import dataclasses
from typing import Annotated, Any, Callable

import jax
import ml_collections
import optax

from mixer_jax import options
from mixer_jax.errors import UserError
from mixer_jax.optim import schedules, step_norms
from mixer_jax.optim.config_fields import OPTIMIZERS, Given, Problem, curvature
from mixer_jax.optim.curvature.blocks import Block, path_name
from mixer_jax.optim.graft import SCOPES, graft


@dataclasses.dataclass(frozen=True)
class General:
  """Options of every optimizer but `graft`."""

  learning_rate: Annotated[float, options.Option("learning rate", 0)] = 1e-3
  clip_norm: Annotated[float, options.Option("largest global norm of the gradient; 0: any", 0)] = (
    0.0
  )
  decay: Annotated[
    str, options.Option("parameters that weight decay applies to", choices=("kernels", "all"))
  ] = "kernels"


@dataclasses.dataclass(frozen=True)
class Graft:
  """Options of a grafted pair, beside the two sides."""

  scope: options.one_of("norms of each tensor, or of the whole tree", SCOPES) = "tensor"
  eps: Annotated[float, options.Option("added to the norm of the direction", 0)] = 1e-16


_GENERAL = options.of(General)


def group(
  name: str, learning_rate: float | None = None, **values: Any
) -> ml_collections.ConfigDict:
  """The part of a config for an optimizer of `OPTIMIZERS`, with options of any of them.

  `check` tells mistakes in it, a missing rate among them.
  """
  config = options.group(OPTIMIZERS, name)
  config.update(options.group(General, learning_rate=learning_rate))
  config.update(values)
  return config


def check(config: ml_collections.ConfigDict, path: str = "optimizer") -> None:
  """Checks the names and values of an optimizer's options, on both sides of a pair.

  Raises:
    UserError: an unknown optimizer, an option that it does not take, a missing side; `path`
      is the place of the config in a larger one.
  """
  if options.chosen(config, {**OPTIMIZERS, "graft": Graft}, path) is not Graft:
    options.check(config, OPTIMIZERS, path, _GENERAL)
    return
  for side in step_norms.SIDES:
    if not config.get(side):
      raise UserError(f"{path}.{side} is missing; graft takes two complete optimizer configs")
    check(config[side], f"{path}.{side}")
  rest = {k: v for k, v in config.items() if k not in step_norms.SIDES and v is not None}
  options.check(ml_collections.ConfigDict(rest), {"graft": Graft}, path)


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
    config: `name`, the options of every optimizer (`General`) and of the named one, None
      for its default; or `name` "graft" with the complete configs `magnitude` and `direction`.
    multiplier: the schedule, see `schedules.Multiplier`.
    problem: the task as K-FAC sees it; None, of an optimizer that needs no model.
    numbers: replace those of the config, see `numbers`; traced values are welcome.
    decayed: whether decay="kernels" applies to the parameter of a path; None: `is_kernel`.
    decay: multiplier of the weight decay by the update count; None: constant.

  Returns:
    A transform that takes `batch` and `rng` as extra arguments.

  Raises:
    UserError: an unknown optimizer, or an option that it does not take; a weight decay of K-FAC
      that is not constant; of the transform's `init`, parameters.
  """
  check(config)
  given = _numbers(config) if numbers is None else numbers
  try:
    if config.name == "graft":
      sides = (
        build(config[s], multiplier, problem, given[s], decayed, decay) for s in step_norms.SIDES
      )
      own = {k: config[k] for k in options.of(Graft) if config.get(k) is not None}
      return graft(*sides, **own, matrices=problem.matrices() if problem else None)
    tx = _one(config, multiplier, problem, given, decayed or is_kernel, decay)
  except (ValueError, ImportError) as e:
    raise UserError(f"optimizer {config.name}: {e}") from e
  if config.get("clip_norm"):
    squares = config.get("eigenvalues") == "batch"
    if config.get("quadratic_model") or config.get("adaptive_damping") or squares:
      use = "eigenvalues=batch" if squares else "a quadratic model"
      raise UserError(f"optimizer {config.name}: {use} needs clip_norm=0")
    tx = optax.chain(optax.clip_by_global_norm(config.clip_norm), tx)
  tx = optax.with_extra_args_support(tx)
  return tx._replace(init=_told(tx.init, config.name))


def _told(init: Callable[[Any], Any], name: str) -> Callable[[Any], Any]:
  """The function of parameters with a UserError for those that the optimizer does not take."""

  def told_init(params):
    try:
      return init(params)
    except ValueError as e:
      raise UserError(f"optimizer {name}: {e}") from e

  return told_init


def _one(config, multiplier, problem, given, decayed, decay):
  """The optimizer of one group."""
  by_path = lambda params: jax.tree_util.tree_map_with_path(
    lambda k, _: decayed(path_name(k)), params
  )
  mask = by_path if config.decay == "kernels" else None
  rate = lambda count: given["learning_rate"] * multiplier(count)
  most = options.value(OPTIMIZERS, config, "weight_decay")
  if decay is not None and config.name == "kfac":
    raise ValueError("schedule.decay_end: the weight decay of kfac is constant; set it to 1")
  scheduled = most if decay is None else lambda count: most * decay(count)
  if problem is None and config.name.startswith("kfac"):
    raise ValueError("problem is None; allowed: a Problem, whose layers it sees")
  common = dict(weight_decay=scheduled, decay_mask=mask)
  return OPTIMIZERS[config.name](
    Given(rate, common, problem, given.get("damping")), **_fields(config)
  )


def _fields(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """The fields of a group that are set, without those of every optimizer."""
  return {k: v for k, v in options.given(config).items() if k not in _GENERAL}


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


def kfac_blocks(config: ml_collections.ConfigDict, problem: Problem) -> tuple[Block, ...]:
  """The blocks of the curvature that a group of `kfac_sides` has."""
  return curvature({**OPTIMIZERS[config.name].defaults, **_fields(config)}, problem).blocks


def is_kernel(path: str) -> bool:
  """Whether a parameter is a kernel, by its last name."""
  return path.rpartition("/")[2] == "kernel"


def table() -> str:
  """The options of all optimizers as a Markdown table."""
  head, line, name, *rest = options.table(OPTIMIZERS | {"graft": Graft}, "optimizer.").splitlines()
  row = lambda name, *cells: f"| `optimizer.{name}` | {' | '.join(cells)} |"
  every, side = "all but graft", ("graft", "", "a complete optimizer")
  general = [row(k, every, f"`{o.default!r}`", o.allowed, o.help) for k, o in _GENERAL.items()]
  sides = [row(name, *side, f"gives the {name}") for name in step_norms.SIDES]
  return "\n".join((head, line, name, *general, *rest, *sides))
