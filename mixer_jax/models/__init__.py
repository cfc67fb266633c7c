"""Models by name: `build("mixer_b16", num_classes=10)`, encoders of text, translators, operators.

encoder("bert_mini", vocab_size=30522, max_length=128)
translator("resmlp_translate_6", vocab_size=32000, max_length=128)
operator("galerkin_1d", grid=(512,))
"""

from typing import Any, Callable, Mapping

import flax.linen as nn

from mixer_jax import options
from mixer_jax.errors import UserError
from mixer_jax.models.absorb import absorb_affine
from mixer_jax.models.blocks import apart, stacked, unrolled
from mixer_jax.models.family import LAYER_KINDS, Model
from mixer_jax.models.gmlp import Gmlp
from mixer_jax.models.mixer import Mixer
from mixer_jax.models.operator_model import Operator
from mixer_jax.models.point_mlp import POINT_NETS, PointMlp
from mixer_jax.models.regnet import RegNetY
from mixer_jax.models.resmlp import ResMlp
from mixer_jax.models.resnet import ResNet
from mixer_jax.models.roles import (
  FAMILIES,
  OPERATOR_FAMILIES,
  TEXT_FAMILIES,
  by_numbers,
  depths,
  is_decayed,
  layer_kind,
  reads_tokens,
  token_axes,
)
from mixer_jax.models.shorten import shortened
from mixer_jax.models.text import GmlpText, MixerText, ResMlpText, TextModel
from mixer_jax.models.text_heads import MaskedLm, TextClassifier
from mixer_jax.models.transformer import Bert
from mixer_jax.models.translation import FAMILY as _TRANSLATION
from mixer_jax.models.translation import Translator

VARIANTS = {name: model for family in FAMILIES for name, model in family.variants.items()}
# Those of images as a grid of patches, without statistics of batches: backbones of other tasks.
BACKBONES = {name: model for name, model in VARIANTS.items() if issubclass(model.func, Model)}
ENCODERS = {name: model for family in TEXT_FAMILIES for name, model in family.variants.items()}
OPERATORS = {k: model for family in OPERATOR_FAMILIES for k, model in family.variants.items()}
TRANSLATORS = _TRANSLATION.variants
_IMAGE_SIZES = {name: size for family in FAMILIES for name, size in family.image_sizes.items()}


def fields(name: str) -> dict[str, Any]:
  """All options of the named model with their values; raises a UserError for an unknown name."""
  return _fields(VARIANTS, name)


def build(name: str, num_classes: int, **overrides: Any) -> nn.Module:
  """Builds the named model; `overrides` replace any of its fields.

  Raises:
    UserError: an unknown name, an unknown field, or a value that the field does not take.
  """
  _check(VARIANTS, name, overrides)
  return VARIANTS[name](num_classes=num_classes, **overrides)


def encoder(
  name: str,
  *,
  vocab_size: int,
  max_length: int,
  segments: int = 0,
  features_dim: int = 0,
  **overrides: Any,
) -> TextModel:
  """Builds the named encoder of text, one of `ENCODERS`; errors are those of `build`.

  The first arguments are as in `TextModel`; `overrides` replace any option of the encoder.
  """
  _check(ENCODERS, name, overrides)
  sizes = dict(vocab_size=vocab_size, max_length=max_length)
  return ENCODERS[name](**sizes, segments=segments, features_dim=features_dim, **overrides)


def operator(
  name: str, *, grid: tuple[int, ...], inputs: int = 1, outputs: int = 1, **overrides: Any
) -> Operator:
  """Builds the named model of an operator, one of `OPERATORS`; errors are those of `build`.

  The first arguments are as in `Operator`; `overrides` replace any option of the model but those
  that it does not read.
  """
  _check(OPERATORS, name, overrides)
  if not (isinstance(grid, tuple | list) and all(hasattr(n, "__index__") for n in grid)):
    raise UserError(f"grid is {grid!r}; allowed: the points of each axis, as (64,) or (85, 85)")
  model = OPERATORS[name](grid=tuple(grid), inputs=inputs, outputs=outputs, **overrides)
  for field in overrides:
    if by := model.unread.get(field):
      why = f"which {name} with model.{by}={getattr(model, by)!r} does not read"
      raise UserError(f"model.{field} is {overrides[field]!r}, {why}; allowed: its default, None")
  return model


def operator_axes(name: str) -> tuple[int, ...]:
  """How many axes the functions of the named operator may have; a UserError if it is unknown."""
  _fields(OPERATORS, name)
  return OPERATORS[name].keywords.get("axes", Operator.axes)


def translator(name: str, *, vocab_size: int, max_length: int, **overrides: Any) -> Translator:
  """Builds the named encoder and decoder, one of `TRANSLATORS`; errors are those of `build`.

  The first arguments are as in `Translator`; `overrides` replace any of its options.
  """
  _check(TRANSLATORS, name, overrides)
  return TRANSLATORS[name](vocab_size=vocab_size, max_length=max_length, **overrides)


def image_size(name: str) -> int:
  """Side in pixels of the square images that the named model is meant for."""
  return _IMAGE_SIZES.get(name, 224)


def _fields(variants: Mapping[str, Callable], name: str) -> dict[str, Any]:
  if name not in variants:
    makers = {"build": VARIANTS, "encoder": ENCODERS}
    makers |= {"operator": OPERATORS, "translator": TRANSLATORS}
    for maker, others in makers.items():
      if name in others:
        raise UserError(f"model.name is {name!r}, a model that `models.{maker}` builds")
    raise UserError(f"model.name is {name!r}; {options.allowed_names(name, variants)}")
  return {field: option.default for field, option in options.of(variants[name]).items()}


def _check(variants: Mapping[str, Callable], name: str, overrides: Mapping[str, Any]) -> None:
  known = _fields(variants, name)
  for field in overrides:
    if field not in known:
      raise UserError(f"model.{field} is no field of {name}; it has {', '.join(known)}")
