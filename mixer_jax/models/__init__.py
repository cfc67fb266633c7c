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

__all__ = (
  # by name
  "build",
  "encoder",
  "fields",
  "image_size",
  "operator",
  "operator_axes",
  "translator",
  "BACKBONES",
  "ENCODERS",
  "OPERATORS",
  "TRANSLATORS",
  "VARIANTS",
  # modules
  "Bert",
  "Gmlp",
  "GmlpText",
  "MaskedLm",
  "Mixer",
  "MixerText",
  "Operator",
  "PointMlp",
  "RegNetY",
  "ResMlp",
  "ResMlpText",
  "ResNet",
  "TextClassifier",
  "Translator",
  # parameters
  "absorb_affine",
  "shortened",
  "stacked",
  "unrolled",
)


def _variants(families: Iterable[Family]) -> dict[str, Callable]:
  return {name: model for family in families for name, model in family.variants.items()}


VARIANTS = _variants(FAMILIES)
"""Models of images by name: functions from fields to a module."""
BACKBONES = {name: model for name, model in VARIANTS.items() if issubclass(model.func, Model)}
"""Those of `VARIANTS` that cut images into a grid of patches: backbones of other tasks."""
ENCODERS = _variants(TEXT_FAMILIES)
"""Encoders of text by name: functions from fields to a module."""
OPERATORS = _variants(OPERATOR_FAMILIES)
"""Models of operators by name: functions from fields to a module."""
TRANSLATORS = _TRANSLATION.variants
"""Translators by name: functions from fields to a module."""
_IMAGE_SIZES = {name: size for family in FAMILIES for name, size in family.image_sizes.items()}


def fields(name: str) -> dict[str, Any]:
  """Returns all options of the named model of images with their values.

  Args:
    name: a key of `VARIANTS`.

  Returns:
    The values by field.

  Raises:
    UserError: there is no such model.

  Example:
    ```python
    from mixer_jax import models

    assert models.fields("mixer_b16")["hidden_dim"] == 768
    ```
  """
  return {field: option.default for field, option in options.of(_named(VARIANTS, name)).items()}


def build(name: str, num_classes: int, **overrides: Any) -> nn.Module:
  """Builds the named model of images, a Linen module.

  Args:
    name: a key of `VARIANTS`, such as "mixer_b16", "resmlp_s12", "gmlp_s16" or "resnet_50".
    num_classes: width of the head; 0 means features without a head.
    **overrides: values of fields that replace those of the named model.

  Returns:
    A module that maps images [batch, height, width, 3] to float32 logits [batch, num_classes].

  Raises:
    UserError: there is no such model, or a field does not take its value.

  Example:
    ```python
    import jax
    import jax.numpy as jnp
    from mixer_jax import models

    model = models.build("mixer_s4", num_classes=10, num_blocks=1, hidden_dim=8)
    images = jnp.zeros((2, 32, 32, 3))
    logits, variables = jax.jit(model.init_with_output)(jax.random.key(0), images)
    assert logits.shape == (2, 10)
    ```
  """
  return _named(VARIANTS, name)(num_classes=num_classes, **overrides)


def encoder(name: str, *, vocab_size: int, max_length: int, **overrides: Any) -> TextModel:
  """Builds the named encoder of text, a Linen module.

  Args:
    name: a key of `ENCODERS`, such as "gmlp_text_small" or "bert_mini".
    vocab_size: number of words of the embedding.
    max_length: most tokens of a sequence.
    **overrides: values of fields that replace those of the named encoder.

  Returns:
    A module that maps ids [batch, tokens] and their mask to [batch, tokens, hidden_dim].

  Raises:
    UserError: there is no such encoder, or a field does not take its value.

  Example:
    ```python
    import jax
    import jax.numpy as jnp
    from mixer_jax import models

    model = models.encoder("gmlp_text_small", vocab_size=11, max_length=4, num_blocks=1)
    ids, mask = jnp.ones((2, 4), int), jnp.ones((2, 4), bool)
    tokens, variables = jax.jit(model.init_with_output)(jax.random.key(0), ids, mask)
    assert tokens.shape == (2, 4, 128)
    ```
  """
  return _named(ENCODERS, name)(vocab_size=vocab_size, max_length=max_length, **overrides)


def operator(name: str, *, grid: tuple[int, ...], **overrides: Any) -> Operator:
  """Builds the named model of an operator between functions on a grid, a Linen module.

  Args:
    name: a key of `OPERATORS`, such as "fno_1d" or "galerkin_2d".
    grid: points along each axis of the training grid.
    **overrides: values of fields that replace those of the named model, but for those that it does
      not read.

  Returns:
    A module that maps values `[batch, *grid, inputs]` and positions to
    `[batch, *grid, outputs]`.

  Raises:
    UserError: there is no such model, or a field does not take its value or is not read.

  Example:
    ```python
    import jax
    import jax.numpy as jnp
    from mixer_jax import models

    model = models.operator("fno_1d", grid=(32,), modes=4)
    positions = jnp.linspace(0, 1, 32)[:, None]
    values = jnp.sin(positions)[None]  # a batch of one function
    outputs, variables = jax.jit(model.init_with_output)(jax.random.key(0), values, positions)
    assert outputs.shape == (1, 32, 1)
    ```
  """
  model = _named(OPERATORS, name)(grid=tuple(grid), **overrides)
  for field in overrides:
    if by := model.unread.get(field):
      why = f"which {name} with model.{by}={getattr(model, by)!r} does not read"
      raise UserError(f"model.{field} is {overrides[field]!r}, {why}; allowed: its default, None")
  return model


def operator_axes(name: str) -> tuple[int, ...]:
  """Returns how many axes the functions of the named operator may have.

  Args:
    name: a key of `OPERATORS`.

  Returns:
    The allowed numbers of axes.

  Raises:
    UserError: there is no such model.

  Example:
    ```python
    from mixer_jax import models

    assert models.operator_axes("fno_2d") == (2,)
    ```
  """
  return _named(OPERATORS, name).keywords.get("axes", Operator.axes)


def translator(name: str, *, vocab_size: int, max_length: int, **overrides: Any) -> Translator:
  """Builds the named encoder and decoder of translations, a Linen module.

  Args:
    name: a key of `TRANSLATORS`, such as "resmlp_translate_6".
    vocab_size: number of words of source and target together.
    max_length: most tokens of a source, and of a target.
    **overrides: values of fields that replace those of the named model.

  Returns:
    A `Translator`.

  Raises:
    UserError: there is no such model, or a field does not take its value.

  Example:
    ```python
    import jax
    import jax.numpy as jnp
    from mixer_jax import models

    sizes = dict(vocab_size=11, max_length=4, num_blocks=1)
    model = models.translator("resmlp_translate_small", **sizes)
    ids, mask = jnp.ones((2, 4), int), jnp.ones((2, 4), bool)
    logits, variables = jax.jit(model.init_with_output)(jax.random.key(0), ids, mask, ids, mask)
    assert logits.shape == (2, 4, 11)
    ```
  """
  return _named(TRANSLATORS, name)(vocab_size=vocab_size, max_length=max_length, **overrides)


def image_size(name: str) -> int:
  """Returns the side in pixels of the square images that the named model is meant for.

  Args:
    name: a key of `VARIANTS`.

  Returns:
    The side; 224 unless the model is for small images.

  Example:
    ```python
    from mixer_jax import models

    assert (models.image_size("mixer_b16"), models.image_size("mixer_b4")) == (224, 32)
    ```
  """
  return _IMAGE_SIZES.get(name, 224)


def _named(variants: Mapping[str, Callable], name: str) -> Callable:
  if name not in variants:
    raise UserError(f"model.name is {name!r}; {options.allowed_names(name, variants)}")
  return variants[name]
