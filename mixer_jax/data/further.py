"""Further test sets, of other sources than the run's own: named for a run, or once it is finished."""

import re
from typing import Annotated, Any, Iterable

from mixer_jax.errors import UserError
from mixer_jax.options import Option
from mixer_jax.paths import user_path

TFDS = "tfds:"
_WHAT = "further test sets of other sources, NAME=PLACE with commas: "


def option(what: str) -> Any:
  """The type of the field `test_sets` of data whose places are `what`."""
  return Annotated[str, Option(_WHAT + what, free=True)]


class Place(str):
  """An absolute path, or "tfds:NAME[@SPLIT]", in the place of a base split; no split has such a name."""

  @property
  def source(self) -> tuple[str, str]:
    """The path and "", or the TFDS name and the split."""
    if not self.startswith(TFDS):
      return str(self), ""
    name, _, split = self.removeprefix(TFDS).partition("@")
    return name, split or "test"


def places(text: str, taken: Iterable[str]) -> dict[str, Place]:
  """The places of a field `data.test_sets` by name; a UserError if a name is one of those `taken`."""
  found = pairs(text, "data.test_sets")
  if twice := found.keys() & {*taken}:
    raise UserError(f"data.test_sets has {min(twice)!r}, the name of a split; take another one")
  path = lambda place: place if place.startswith(TFDS) else user_path(place).absolute()
  return {name: Place(path(place)) for name, place in found.items()}


def pairs(text: str, field: str) -> dict[str, str]:
  """The values of "NAME=VALUE,NAME=VALUE" by name; a UserError if a field has another text."""
  found = {}
  for part in filter(None, (part.strip() for part in text.split(","))):
    name, _, value = (piece.strip() for piece in part.partition("="))
    if not re.fullmatch(r"\w[\w.-]*", name) or not value or name in found:
      raise UserError(f"{field} has {part!r}; allowed: NAME=VALUE with commas, each name once")
    found[name] = value
  return found
