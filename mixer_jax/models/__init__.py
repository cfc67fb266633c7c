"""Models by name: `build("mixer_b16", num_classes=10)`."""

import dataclasses
import difflib
from typing import Any

import flax.linen as nn

from mixer_jax.errors import UserError
from mixer_jax.models import mixer
from mixer_jax.models.mixer import Mixer

__all__ = ["Mixer", "VARIANTS", "build", "fields"]

# Each family: its class and its named variants (field values of the class).
_FAMILIES = ((mixer.Mixer, mixer.VARIANTS),)

VARIANTS = {name: (cls, fields) for cls, variants in _FAMILIES for name, fields in variants.items()}


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
    UserError: an unknown name, or a field that the model does not have.
  """
  known = fields(name)
  for field in overrides:
    if field not in known:
      raise UserError(f"model.{field} is no field of {name}; it has {', '.join(known)}")
  cls, _ = VARIANTS[name]
  return cls(**known | overrides | {"num_classes": num_classes})
