"""Models by name: `build("mixer_b16", num_classes=10)`, encoders of text, translators, operators.

encoder("bert_mini", vocab_size=30522, max_length=128)
translator("resmlp_translate_6", vocab_size=32000, max_length=128)
operator("galerkin_1d", grid=(512,))
"""

from typing import Any, Callable, Iterable, Mapping

import flax.linen as nn

from mixer_jax import options
from mixer_jax.errors import UserError
from mixer_jax.models.absorb import absorb_affine
from mixer_jax.models.blocks import apart, stacked, unrolled
from mixer_jax.models.family import LAYER_KINDS, Family, Model
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


def _variants(families: Iterable[Family]) -> dict[str, Callable]:
  return {name: model for family in families for name, model in family.variants.items()}


VARIANTS = _variants(FAMILIES)
# Models of images that are cut into a grid of patches: backbones of other tasks.
BACKBONES = {name: model for name, model in VARIANTS.items() if issubclass(model.func, Model)}
ENCODERS = _variants(TEXT_FAMILIES)
OPERATORS = _variants(OPERATOR_FAMILIES)
TRANSLATORS = _TRANSLATION.variants
_IMAGE_SIZES = {name: size for family in FAMILIES for name, size in family.image_sizes.items()}


def fields(name: str) -> dict[str, Any]:
  """All options of the named model with their values; raises a UserError for an unknown name."""
  return {field: option.default for field, option in options.of(_named(VARIANTS, name)).items()}


def build(name: str, num_classes: int, **overrides: Any) -> nn.Module:
  """Builds the named model; `overrides` replace any of its fields.

  Raises:
    UserError: the name is unknown, or a field does not take its value.
  """
  return _named(VARIANTS, name)(num_classes=num_classes, **overrides)


def encoder(name: str, *, vocab_size: int, max_length: int, **overrides: Any) -> TextModel:
  """Builds the named encoder of text, one of `ENCODERS`; errors are those of `build`.

  The arguments are as in `TextModel`; `overrides` replace any field of the encoder.
  """
  return _named(ENCODERS, name)(vocab_size=vocab_size, max_length=max_length, **overrides)


def operator(name: str, *, grid: tuple[int, ...], **overrides: Any) -> Operator:
  """Builds the named model of an operator, one of `OPERATORS`; errors are those of `build`.

  `overrides` replace any field of `Operator` or of the model but those that it does not read.
  """
  model = _named(OPERATORS, name)(grid=tuple(grid), **overrides)
  for field in overrides:
    if by := model.unread.get(field):
      why = f"which {name} with model.{by}={getattr(model, by)!r} does not read"
      raise UserError(f"model.{field} is {overrides[field]!r}, {why}; allowed: its default, None")
  return model


def operator_axes(name: str) -> tuple[int, ...]:
  """How many axes the functions of the named operator may have."""
  return _named(OPERATORS, name).keywords.get("axes", Operator.axes)


def translator(name: str, *, vocab_size: int, max_length: int, **overrides: Any) -> Translator:
  """Builds the named encoder and decoder, one of `TRANSLATORS`; errors are those of `build`.

  The arguments are as in `Translator`; `overrides` replace any of its fields.
  """
  return _named(TRANSLATORS, name)(vocab_size=vocab_size, max_length=max_length, **overrides)


def image_size(name: str) -> int:
  """Side in pixels of the square images that the named model is meant for."""
  return _IMAGE_SIZES.get(name, 224)


def _named(variants: Mapping[str, Callable], name: str) -> Callable:
  if name not in variants:
    raise UserError(f"model.name is {name!r}; {options.allowed_names(name, variants)}")
  return variants[name]
