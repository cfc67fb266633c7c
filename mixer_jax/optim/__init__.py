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
from mixer_jax.optim import first_order, schedules
from mixer_jax.optim.blocks import path_name
from mixer_jax.optim.graft import GraftState, graft
from mixer_jax.optim.kfac import ScaleByKfacState, kfac, kfac_blocks, kfac_factors, scale_by_kfac

__all__ = [
  "GraftState",
  "Problem",
  "ScaleByKfacState",
  "build",
  "config_fields",
  "decay_mask",
  "graft",
  "kfac",
  "kfac_blocks",
  "kfac_factors",
  "learning_rate",
  "scale_by_kfac",
  "schedules",
]


class Problem(NamedTuple):
  """What a curvature-based optimizer is told about the task.

  Attributes:
    predict: maps (params, batch) to (outputs, targets).
    params: the parameters, or their shapes.
    batch: an example batch, or its shapes.
    likelihood: "categorical" or "normal".
  """

  predict: Callable[[Any, Any], Any]
  params: Any
  batch: Any
  likelihood: str


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
  identity_start: bool = True,
  decay_from: int | None = None,
) -> optax.GradientTransformation:
  options = {k: v for k, v in locals().items() if k not in ("learning_rate", "problem")}
  options["norm_constraint"] = norm_constraint or None  # 0 in a config: none
  return kfac(
    learning_rate,
    problem.predict,
    problem.params,
    problem.batch,
    likelihood=problem.likelihood,
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


def _options(name: str) -> dict[str, inspect.Parameter]:
  parameters = inspect.signature(_OPTIMIZERS[name]).parameters
  return {k: p for k, p in parameters.items() if p.kind is p.KEYWORD_ONLY and k != "decay_mask"}


def config_fields() -> dict[str, type]:
  """The options of all optimizers with their types, for the config."""
  fields = {k: p.annotation for name in _OPTIMIZERS for k, p in _options(name).items()}
  return {k: int if t == (int | None) else t for k, t in fields.items()}


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
  if config.name == "graft":
    sides = [config.get(side) or _missing(side) for side in ("magnitude", "direction")]
    extra = {k: config[k] for k in ("scope", "eps") if config.get(k) is not None}
    try:
      return graft(*(build(side, multiplier, problem) for side in sides), **extra)
    except ValueError as e:
      raise UserError(f"optimizer graft: {e}") from e
  if config.name not in _OPTIMIZERS:
    raise UserError(f"optimizer.name is {config.name!r}; allowed: {', '.join(NAMES)}")
  known = _options(config.name)
  general = ("name", "learning_rate", "clip_norm", "decay")
  options = {k: v for k, v in config.items() if k not in general and v is not None}
  if unknown := set(options) - set(known):
    raise UserError(
      f"optimizer.{sorted(unknown)[0]} is no option of {config.name}; it takes {', '.join(known)}"
    )
  if config.decay not in ("all", "kernels"):
    raise UserError(f"optimizer.decay is {config.decay!r}; allowed: all, kernels")
  options["decay_mask"] = decay_mask if config.decay == "kernels" else None
  args = (problem,) if config.name == "kfac" else ()
  try:
    tx = _OPTIMIZERS[config.name](learning_rate(config, multiplier), *args, **options)
  except (ValueError, ImportError) as e:
    raise UserError(f"optimizer {config.name}: {e}") from e
  if config.clip_norm:
    tx = optax.chain(optax.clip_by_global_norm(config.clip_norm), tx)
  return optax.with_extra_args_support(tx)


def _missing(side: str):
  raise UserError(f"optimizer.{side} is missing; graft takes two complete optimizer configs")


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
