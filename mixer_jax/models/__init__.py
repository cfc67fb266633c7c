"""Models by name: `build("mixer_b16", num_classes=10)`."""

import difflib
from typing import Any

import flax.linen as nn

from mixer_jax import options
from mixer_jax.errors import UserError
from mixer_jax.models import gmlp, mixer, resmlp
from mixer_jax.models.absorb import absorb_affine
from mixer_jax.models.blocks import stacked, unrolled
from mixer_jax.models.family import COMMON, LAYER_KINDS, role
from mixer_jax.models.gmlp import Gmlp
from mixer_jax.models.mixer import Mixer
from mixer_jax.models.resmlp import ResMlp

_FAMILIES = (mixer.FAMILY, resmlp.FAMILY, gmlp.FAMILY)

VARIANTS = {name: model for family in _FAMILIES for name, model in family.variants.items()}
_LAYERS = COMMON | {path: layer for family in _FAMILIES for path, layer in family.layers.items()}
_IMAGE_SIZES = {name: size for family in _FAMILIES for name, size in family.image_sizes.items()}
_DECAYED = {leaf for family in _FAMILIES for leaf in family.decayed}


def fields(name: str) -> dict[str, Any]:
  """All options of the named model with their values; raises a UserError for an unknown name."""
  if name not in VARIANTS:
    near = difflib.get_close_matches(name, VARIANTS, n=3) or list(VARIANTS)
    raise UserError(f"model.name is {name!r}; known models: {', '.join(near)}")
  return {field: option.default for field, option in options.of(VARIANTS[name]).items()}


def build(name: str, num_classes: int, **overrides: Any) -> nn.Module:
  """Builds the named model; `overrides` replace any of its fields.

  Raises:
    UserError: an unknown name, an unknown field, or a value that the field does not take.
  """
  known = fields(name)
  for field in overrides:
    if field not in known:
      raise UserError(f"model.{field} is no field of {name}; it has {', '.join(known)}")
  return VARIANTS[name](num_classes=num_classes, **overrides)


def image_size(name: str) -> int:
  """Side in pixels of the square images that the named model is meant for."""
  return _IMAGE_SIZES.get(name, 224)


def layer_kind(path: str) -> str:
  """The kind of layer, one of `LAYER_KINDS`, of a parameter as "MixerBlock_0/LayerNorm_0/scale"."""
  layer = role(_LAYERS, path)
  return layer.kind if layer else "channel_mixing"


def token_axes(path: str) -> tuple[str, ...]:
  """The meaning of each axis of an unrolled parameter over tokens: "in", "out", "hidden"; or ()."""
  layer, leaf = role(_LAYERS, path), path.rpartition("/")[2]
  if not layer or "Block_" not in path:
    return ()
  return {"kernel": layer.token_axes, "bias": layer.token_axes[1:]}.get(leaf, ())


def reads_tokens(path: str) -> bool:
  """Whether a parameter is the first matrix over tokens of its block, [tokens, units]."""
  layer = role(_LAYERS, path)
  return bool(layer) and path.endswith("/kernel") and layer.token_axes[:1] == ("in",)


def is_decayed(path: str) -> bool:
  """Whether weight decay of "kernels" acts on a parameter: not on biases, norms and scales."""
  return path.rpartition("/")[2] in _DECAYED
