"""A griffe extension of the site: the fields of a model in its docstring, made from its options."""

import inspect
import re

import griffe

from mixer_jax import models, options

_TYPES = {object: "int | tuple[int, int]", tuple: "tuple[int, ...]"}
_ATTRIBUTES = re.compile(r"\nAttributes:\n((?:  .*(?:\n|$))+)")


def _line(option: options.Option) -> str:
  kind = _TYPES.get(option.type, option.type.__name__) + (" | None" if option.optional else "")
  choices = ", ".join(f"`{x!r}`" for x in option.choices)
  allowed = f" Allowed: {choices}." if choices else ""
  needed = option.default is options.REQUIRED
  default = "" if needed else f" The default is `{option.default!r}`."
  return f"  {option.name} ({kind}): {option.help}.{allowed}{default}\n"


def with_fields(doc: str, cls: type) -> str:
  """A docstring with the attributes of a class's bases, and a line for each of its options."""
  text, begin, example = doc.partition("\nExample:\n")
  own = _ATTRIBUTES.search(text)
  ours = [base for base in cls.__mro__[1:] if base.__module__.startswith("mixer_jax.")]
  sections = [own, *(_ATTRIBUTES.search(inspect.cleandoc(base.__doc__ or "")) for base in ours)]
  lines = [found[1].rstrip("\n") + "\n" for found in sections if found]
  lines += map(_line, options.of(cls).values())
  start = text[: own.start()] if own else text
  return f"{start.rstrip()}\n\nAttributes:\n{''.join(lines)}{begin}{example}"


class Fields(griffe.Extension):
  """Adds the fields to the classes that `mixer_jax.models` lists."""

  def on_package(self, *, pkg: griffe.Module, **kwargs) -> None:
    for name in models.__all__:
      cls = getattr(models, name)
      if isinstance(cls, type):
        doc = pkg[f"models.{name}"].docstring
        doc.value = with_fields(doc.value, cls)
