"""An optimizer from a group of a config."""

import dataclasses
import functools
from typing import Annotated, Any, Callable

import jax
import jax.numpy as jnp
import ml_collections
import optax

from mixer_jax import options
from mixer_jax.errors import UserError, as_user_error
from mixer_jax.optim import Block, graft, in_turn, path_name
from mixer_jax.optim.graft import SCOPES, SIDES
from mixer_jax.optimizers.registry import OPTIMIZERS, WHOLE_STEPS, Given, Problem
from mixer_jax.optimizers.schedules import Schedule
from mixer_jax.options import Option, one_of


@dataclasses.dataclass(frozen=True)
class General:
  """Options of every optimizer but `graft`."""

  learning_rate: Annotated[float, Option("learning rate", 0)] = 1e-3
  clip_norm: Annotated[float, Option("largest global norm of the gradient; 0: any", 0)] = 0.0
  decay: one_of("parameters that weight decay applies to", ("kernels", "all")) = "kernels"


@dataclasses.dataclass(frozen=True)
class Graft:
  """Options of a grafted pair, beside the two sides."""

  scope: one_of("norms of each tensor, or of the whole tree", SCOPES) = "tensor"
  eps: Annotated[float, Option("added to the norm of the direction", 0)] = 1e-16


@dataclasses.dataclass(frozen=True)
class InTurn:
  """Options of two optimizers in turn, beside these."""

  steps: Annotated[int, Option("updates of the first of two optimizers in turn", 1)] = 1000


_GENERAL = options.of(General)
_OF_CURVATURE = ("kfac", "kfac_adam", "kfac_muon", "gauss_newton", "hessian_free")
# Optimizers that are made of two, by their names: the options that they have, and the names of the two.
_PAIRS = {"graft": (Graft, SIDES), "in_turn": (InTurn, ("first", "second"))}


def group(
  name: str, learning_rate: float | None = None, **values: Any
) -> ml_collections.ConfigDict:
  """Returns the optimizer part of a config, with options of any optimizer.

  Mistakes in it are told when a run starts, a missing rate among them.

  Args:
    name: name of an optimizer, such as "sgd", "kfac" or "kfac_muon".
    learning_rate: the rate before the schedule; None: 1 for optimizers that make whole steps.
    **values: values of any options of the optimizer.

  Returns:
    The part, for `config.optimizer`.

  Example:
    ```python
    from mixer_jax import config as config_lib

    config = config_lib.default()
    config.optimizer = config_lib.optimizer("kfac", learning_rate=0.05, damping=1e-2)
    ```
  """
  learning_rate = 1.0 if learning_rate is None and name in WHOLE_STEPS else learning_rate
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
  own = {name: options_of for name, (options_of, _) in _PAIRS.items()}
  options.chosen(config, {**OPTIMIZERS, **own}, path)
  if config.name not in own:
    options.check(config, OPTIMIZERS, path, _GENERAL)
    return
  sides = _PAIRS[config.name][1]
  for side in sides:
    if not config.get(side):
      raise UserError(
        f"{path}.{side} is missing; {config.name} takes two complete optimizer configs"
      )
    check(config[side], f"{path}.{side}")
    if config.name == "graft" and config[side].name in WHOLE_STEPS:
      raise UserError(f"{path}.{side}.name is {config[side].name}, whose steps are whole ones")
  rest = {k: v for k, v in config.items() if k not in sides}
  options.check(rest, own, path)


def periods(config: ml_collections.ConfigDict) -> dict[str, int]:
  """Updates between renewals of "factors" and of "inverses" or bases; {} if it has none.

  Of a pair they are those of the side that has some.
  """
  if config.name in _PAIRS:
    sides = (periods(config[side]) for side in _PAIRS[config.name][1])
    return next(filter(None, sides), {})
  known = options.of(OPTIMIZERS[config.name])
  value = lambda name: options.value(OPTIMIZERS, config, name) if name in known else None
  last = value("inverse_period") or value("basis_period")
  return {"factors": value("factor_period") or 1, "inverses": last} if last else {}


def build(
  config: ml_collections.ConfigDict,
  multiplier: Schedule,
  problem: Problem | None,
  decayed: Callable[[str], bool] | None = None,
  decay: Schedule | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Builds the optimizer that a group of a config describes.

  Learning rates and dampings are in its state (see `numbers.given`), so that programs do not depend on them.

  Args:
    config: `name`, the options of every optimizer (`General`) and of the named one, None
      for its default; or `name` "graft" with the complete configs `magnitude` and `direction`.
    multiplier: the schedule, see `schedules.Multiplier`.
    problem: the task as K-FAC sees it; None, of an optimizer that needs no model.
    decayed: whether decay="kernels" applies to the parameter of a path; None: `is_kernel`.
    decay: multiplier of the weight decay by the update count; None: constant.

  Returns:
    A transform that takes `batch` and `rng` as extra arguments.

  Raises:
    UserError: an unknown optimizer, or an option that it does not take; a weight decay of K-FAC
      that is not constant; of the transform's `init`, parameters.
  """
  check(config)
  if config.name in _PAIRS:
    made_of, names = _PAIRS[config.name]
    sides = [build(config[side], multiplier, problem, decayed, decay) for side in names]
    own = made_of(**{k: config[k] for k in options.of(made_of) if config.get(k) is not None})
    if config.name == "in_turn":
      return in_turn(sides, [own.steps])
    return graft(*sides, own.scope, own.eps, problem.matrices if problem else None)
  if decay is not None and config.name == "kfac":
    raise UserError("schedule.decay_end: the weight decay of kfac is constant; set it to 1")
  if problem is None and config.name in _OF_CURVATURE:
    raise UserError(f"optimizer {config.name}: problem is None; allowed: a Problem")
  clipped = bool(config.get("clip_norm"))
  if clipped and (config.get("eigenvalues") == "batch" or makes_whole_steps(config)):
    raise UserError(
      f"optimizer {config.name}: clip_norm is {config.clip_norm:g}; allowed: 0, as it needs the"
      " gradient of the batch as it is"
    )
  tx = _with_numbers(config, multiplier, problem, decayed or is_kernel, decay)
  if clipped:
    tx = optax.chain(optax.clip_by_global_norm(config.clip_norm), tx)

  def init(params):
    with as_user_error(f"optimizer {config.name}", ValueError):
      return tx.init(params)

  return tx._replace(init=init)


def _with_numbers(
  config: ml_collections.ConfigDict,
  multiplier: Schedule,
  problem: Problem | None,
  decayed: Callable[[str], bool],
  decay: Schedule | None,
) -> optax.GradientTransformationExtraArgs:
  """The transform of a single optimizer, whose state has its learning rate and damping."""
  optimizer, fields = OPTIMIZERS[config.name], _fields(config)
  most = fields.get("weight_decay", 0.0)
  of_kernels = functools.partial(
    jax.tree_util.tree_map_with_path, lambda path, _: decayed(path_name(path))
  )
  common = dict(
    weight_decay=most if decay is None else lambda count: most * decay(count),
    decay_mask=of_kernels if config.decay == "kernels" else None,
  )
  numbers = {"learning_rate": config.learning_rate}
  numbers |= {"damping": fields["damping"]} if "damping" in fields else {}

  def make(learning_rate, damping=None):
    given = Given(lambda count: learning_rate * multiplier(count), common, problem)
    return optimizer.make(given, fields if damping is None else fields | {"damping": damping})

  # The task's function is traced here, and not while JAX traces `init` or `update`.
  with as_user_error(f"optimizer {config.name}", ValueError, ImportError):
    make(**numbers)
  return optax.inject_hyperparams(make, hyperparam_dtype=jnp.float32)(**numbers)


def _fields(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """Returns the fields of a single optimizer, without those that every optimizer has."""
  own = {k: v for k, v in options.given(config).items() if k not in _GENERAL}
  return OPTIMIZERS[config.name](**own)


def makes_whole_steps(config: ml_collections.ConfigDict) -> bool:
  """Whether an optimizer relies on its updates being applied whole."""
  return any(
    side.name in WHOLE_STEPS or side.get("quadratic_model") or side.get("adaptive_damping")
    for side in leaves(config)
  )


def leaves(config: ml_collections.ConfigDict) -> list[ml_collections.ConfigDict]:
  """Returns the configs of the single optimizers that an optimizer is made of."""
  if config.name not in _PAIRS:
    return [config]
  return [found for side in _PAIRS[config.name][1] for found in leaves(config[side])]


def of_curvature(config: ml_collections.ConfigDict) -> list[ml_collections.ConfigDict]:
  """The parts of an optimizer's config that have a `Curvature`."""
  return [part for part in leaves(config) if part.name in _OF_CURVATURE]


def curvature_blocks(config: ml_collections.ConfigDict, problem: Problem) -> tuple[Block, ...]:
  """Returns the curvature blocks of one of the parts that `of_curvature` finds."""
  return problem.curvature(_fields(config)).blocks


def is_kernel(path: str) -> bool:
  """Whether a parameter is a kernel, by its last name."""
  return path.rpartition("/")[2] == "kernel"


def table() -> str:
  """The options of all optimizers as a Markdown table."""
  own = {name: made_of for name, (made_of, _) in _PAIRS.items()}
  head, line, name, *rest = options.table(OPTIMIZERS | own, "optimizer.").splitlines()
  row = lambda name, *cells: f"| `optimizer.{name}` | {' | '.join(cells)} |"
  every = f"all but {', '.join(_PAIRS)}"
  general = [row(k, every, f"`{o.default!r}`", o.allowed, o.help) for k, o in _GENERAL.items()]
  sides = [
    row(side, pair, "", "a complete optimizer", f"the {side} of the two")
    for pair, (_, names) in _PAIRS.items()
    for side in names
  ]
  return "\n".join((head, line, name, *general, *rest, *sides))
