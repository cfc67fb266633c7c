"""Models by name: `build("mixer_b16", num_classes=10)`."""

import dataclasses
import difflib
from typing import Any

import flax.linen as nn

from mixer_jax.errors import UserError
from mixer_jax.models import gmlp, layers, mixer, resmlp
from mixer_jax.models.absorb import absorb_affine
from mixer_jax.models.blocks import stacked, unrolled
from mixer_jax.models.gmlp import Gmlp
from mixer_jax.models.mixer import Mixer
from mixer_jax.models.resmlp import ResMlp

__all__ = [
  "CHOICES",
  "Gmlp",
  "Mixer",
  "ResMlp",
  "VARIANTS",
  "absorb_affine",
  "build",
  "fields",
  "image_size",
  "stacked",
  "unrolled",
]

# Each family: its class and its named variants (field values of the class).
_FAMILIES = (
  (mixer.Mixer, mixer.VARIANTS),
  (resmlp.ResMlp, resmlp.VARIANTS),
  (gmlp.Gmlp, gmlp.VARIANTS),
)

VARIANTS = {name: (cls, fields) for cls, variants in _FAMILIES for name, fields in variants.items()}
# What the fields of any model may be that take names.
CHOICES = resmlp.CHOICES | gmlp.CHOICES | {"token_mixer": mixer.TOKEN_MIXERS, "gelu": layers.GELUS}


def fields(name: str) -> dict[str, Any]:
  """All fields of the named model with their values (None where required).

  Raises:
    UserError: there is no model of this name.
  """
  if name not in VARIANTS:
    near = difflib.get_close_matches(name, VARIANTS, n=3) or list(VARIANTS)
    raise UserError(f"model.name is {name!r}; known models: {', '.join(near)}")
  cls, variant = VARIANTS[name]
  own = {
    f.name: None if f.default is dataclasses.MISSING else f.default
    for f in dataclasses.fields(cls)
    if f.name not in ("parent", "name")
  }
  return own | variant


def build(name: str, num_classes: int, **overrides: Any) -> nn.Module:
  """Builds the named model; `overrides` replace any of its fields.

  Raises:
    UserError: an unknown name, a field that the model does not have, or a value
      that the field does not take.
  """
  known = fields(name)
  for field in overrides:
    if field not in known:
      raise UserError(f"model.{field} is no field of {name}; it has {', '.join(known)}")
  cls, _ = VARIANTS[name]
  try:
    return cls(**known | overrides | {"num_classes": num_classes})
  except ValueError as e:
    raise UserError(f"model {name}: {e}") from e


def image_size(name: str) -> int:
  """Side in pixels of the square images that the named model is meant for."""
  small = name.rpartition("_")[2] in ("small", "s4", "b4")
  return 32 if small else 224
