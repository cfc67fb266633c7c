"""Starting a run from public weights instead of fresh parameters."""

import math
from typing import Any

import ml_collections

from mixer_jax import pretrained
from mixer_jax.errors import UserError


def adopt(
  config: ml_collections.ConfigDict, stored: ml_collections.ConfigDict | None
) -> tuple[ml_collections.ConfigDict, pretrained.Weights | None]:
  """Completes a config by what its weights fix of the model: GELU, epsilons.

  Fields that the config sets itself stay as they are. The result describes the
  model without the file, so a checkpoint can be evaluated where there is none.

  Args:
    config: of the run; `pretrained` is "" or what `pretrained.read` takes.
    stored: the completed config of a run that is resumed, or None.

  Returns:
    The completed config, and the weights that a fresh run starts from.

  Raises:
    UserError: the weights cannot be read, or were trained on pixels normalised
      in another way and `any_normalization` is False.
  """
  if not config.pretrained:
    return config, None
  config = config.copy_and_resolve_references()
  if stored is not None:
    _complete(config, stored.model.items())
    return config, None
  weights = pretrained.read(config.pretrained)
  _complete(config, weights.model_fields(config.data.image_size, config.resize_tokens).items())
  _check_normalization(config, weights)
  return config, weights


def _complete(config: ml_collections.ConfigDict, fields: Any) -> None:
  for name, value in fields:
    if name in config.model and config.model[name] is None and value is not None:
      config.model[name] = value


def _check_normalization(config: ml_collections.ConfigDict, weights: pretrained.Weights) -> None:
  wanted, data = weights.normalization, config.data
  if wanted is None or config.any_normalization:
    return
  pairs = zip((*wanted.mean, *wanted.std), (*data.mean, *data.std))
  if not all(math.isclose(a, b, abs_tol=1e-3) for a, b in pairs):
    raise UserError(
      f"data.mean and data.std are {tuple(data.mean)} and {tuple(data.std)}, but {weights.source}"
      f" was trained with {wanted.mean} and {wanted.std}; set them so, or any_normalization=True"
    )
