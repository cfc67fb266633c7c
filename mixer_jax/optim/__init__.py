"""Optimizers as optax transforms, and a chain built from a config.

Import `scale_by_kfac`, `kfac` and `graft` from here and use them with any optax
chain and any model of Linen dense layers, inside or outside this project.
"""

import inspect
from typing import Any, Callable, NamedTuple

import jax
import ml_collections
import optax

from mixer_jax.errors import UserError
from mixer_jax.optim import blocks, first_order, schedules
from mixer_jax.optim.blocks import path_name
from mixer_jax.optim.graft import SCOPES, GraftState, graft
from mixer_jax.optim.kfac import ScaleByKfacState, kfac, kfac_blocks, kfac_factors, scale_by_kfac
from mixer_jax.optim.relayout import Layout, relayout

__all__ = [
  "CHOICES",
  "GraftState",
  "Layout",
  "Problem",
  "ScaleByKfacState",
  "build",
  "check",
  "config_fields",
  "decay_mask",
  "graft",
  "kfac",
  "kfac_blocks",
  "kfac_factors",
  "learning_rate",
  "relayout",
  "scale_by_kfac",
  "schedules",
]


class Problem(NamedTuple):
  """What an optimizer is told about the task, each layer's parameters apart.

  Attributes:
    predict: maps (params, batch) to (outputs, targets).
    params: the parameters, or their shapes.
    batch: an example batch, or its shapes.
    likelihood: "categorical" or "normal".
    layout: from the parameters that are trained to `params`; None: they are the same.
    mesh: the devices of the training step, or None.
  """

  predict: Callable[[Any, Any], Any]
  params: Any
  batch: Any
  likelihood: str
  layout: Layout | None = None
  mesh: jax.sharding.Mesh | None = None


def _configured_kfac(
  learning_rate: Any,
  problem: Problem,
  *,
  momentum: float = 0.9,
  weight_decay: float = 1e-4,
  decay_mask: Any = None,
  norm_constraint: float = 1e-2,
  damping: float = 1e-3,
  damping_type: str = "exact",
  factor_decay: float = 0.95,
  factor_period: int = 10,
  inverse_period: int = 100,
  estimation: str = "sampled",
  token_averaging: str = "published",
  norms: str = "gradient",
  precondition_dtype: str = "float32",
  identity_start: bool = True,
  decay_from: int | None = None,
  plain: str = "",
) -> optax.GradientTransformation:
  options = {k: v for k, v in locals().items() if k not in ("learning_rate", "problem")}
  options["norm_constraint"] = norm_constraint or None  # 0 in a config: none
  options["plain"] = (plain,) if plain else ()
  return kfac(
    learning_rate,
    problem.predict,
    problem.params,
    problem.batch,
    likelihood=problem.likelihood,
    mesh=problem.mesh,
    **options,
  )


_OPTIMIZERS = {
  "sgd": first_order.sgd,
  "adam": first_order.adam,
  "adamw": first_order.adamw,
  "lamb": first_order.lamb,
  "adagrad": first_order.adagrad,
  "kfac": _configured_kfac,
}
NAMES = (*_OPTIMIZERS, "graft")
# What the options of all optimizers may be that take names.
CHOICES = {"decay": ("all", "kernels"), "scope": SCOPES, **blocks.CHOICES}
_GENERAL = ("name", "learning_rate", "clip_norm", "decay")
_SIDES = ("magnitude", "direction")
# Those for which it matters what a tensor is; all others work element by element.
_BY_TENSOR = ("lamb", "kfac", "graft")


def _options(name: str) -> dict[str, inspect.Parameter]:
  parameters = inspect.signature(_OPTIMIZERS[name]).parameters
  return {k: p for k, p in parameters.items() if p.kind is p.KEYWORD_ONLY and k != "decay_mask"}


def config_fields() -> dict[str, type]:
  """The options of all optimizers with their types, for the config."""
  fields = {k: p.annotation for name in _OPTIMIZERS for k, p in _options(name).items()}
  return {k: int if t == (int | None) else t for k, t in fields.items()}


def check(config: ml_collections.ConfigDict, path: str = "optimizer") -> None:
  """Refuses options that the named optimizer does not take, on both sides of a pair.

  Args:
    config: see `build`.
    path: the config's place in a larger one, for messages.

  Raises:
    UserError: an unknown optimizer, an option that it does not take, a missing side.
  """
  if config.name not in NAMES:
    raise UserError(f"{path}.name is {config.name!r}; allowed: {', '.join(NAMES)}")
  if config.name == "graft":
    known = (*_SIDES, "scope", "eps")
    if missing := [side for side in _SIDES if not config.get(side)]:
      raise UserError(f"{path}.{missing[0]} is missing; graft takes two complete optimizer configs")
  else:
    known = tuple(_options(config.name))
  general = ("name",) if config.name == "graft" else _GENERAL
  given = (k for k, v in config.items() if v is not None)
  if unknown := sorted(set(given) - {*known, *general}):
    raise UserError(
      f"{path}.{unknown[0]} is no option of {config.name}; it takes {', '.join(known)}"
    )
  if missing := [k for k in general if config.get(k) is None]:
    raise UserError(f"{path}.{missing[0]} is missing from the config")
  for side in _SIDES if config.name == "graft" else ():
    check(config[side], f"{path}.{side}")


def build(
  config: ml_collections.ConfigDict, multiplier: schedules.Schedule, problem: Problem
) -> optax.GradientTransformationExtraArgs:
  """Builds the optimizer that `config.optimizer` describes.

  Args:
    config: `name`, `learning_rate`, `clip_norm` (0: no clipping of the gradient's
      global norm), `decay` ("all" parameters or "kernels" alone) and the options
      of the named optimizer, None for its default; or `name` "graft" with the
      complete configs `magnitude` and `direction`.
    multiplier: the schedule, see `schedules.build`.
    problem: what K-FAC needs to know.

  Returns:
    A transform that takes `batch` and `rng` as extra arguments.

  Raises:
    UserError: an unknown optimizer, or an option that it does not take.
  """
  check(config)
  try:
    tx = _build(config, multiplier, problem)
  except (ValueError, ImportError) as e:
    raise UserError(f"optimizer {config.name}: {e}") from e
  by_tensor = problem and problem.layout and config.name in _BY_TENSOR
  return relayout(tx, problem.layout) if by_tensor else tx


def _build(config, multiplier, problem):
  if config.name == "graft":
    extra = {k: config[k] for k in ("scope", "eps") if config.get(k) is not None}
    return graft(*(_build(config[side], multiplier, problem) for side in _SIDES), **extra)
  if config.decay not in CHOICES["decay"]:
    raise ValueError(f"decay is {config.decay!r}; allowed: {', '.join(CHOICES['decay'])}")
  options = {k: v for k, v in config.items() if k not in _GENERAL and v is not None}
  options["decay_mask"] = decay_mask if config.decay == "kernels" else None
  args = (problem,) if config.name == "kfac" else ()
  tx = _OPTIMIZERS[config.name](learning_rate(config, multiplier), *args, **options)
  if config.clip_norm:
    tx = optax.chain(optax.clip_by_global_norm(config.clip_norm), tx)
  return optax.with_extra_args_support(tx)


def learning_rate(
  config: ml_collections.ConfigDict, multiplier: schedules.Schedule
) -> schedules.Schedule:
  """The rate applied at an update; of a grafted pair, that of the magnitude."""
  while config.name == "graft":
    config = config.magnitude
  return lambda count: config.learning_rate * multiplier(count)


def decay_mask(params: Any) -> Any:
  """True for kernels and Toeplitz diagonals, False for biases, norms, scales and tokens."""
  return jax.tree_util.tree_map_with_path(
    lambda path, _: path_name(path).rpartition("/")[2] in ("kernel", "diagonals"), params
  )
