"""Which fields a config has, and of what type each is: those of `config.default`."""

import functools
import math
from typing import Any

import ml_collections

from mixer_jax import config as config_lib
from mixer_jax.errors import UserError

# Computations are in float32: what it cannot hold would be infinite there.
_LARGEST = 3.4e38
_KINDS = {
  bool: "True or False",
  int: "an integer",
  float: "a finite number",
  str: "a text of one line, at most 4096 characters",
  tuple: "a list of finite numbers",
  ml_collections.ConfigDict: "a group of fields",
}


def check(config: ml_collections.ConfigDict) -> None:
  """Compares the names and types of a config's fields with those of `config.default`.

  Raises:
    UserError: names the first field that is unknown, missing or of another type.
  """
  _check_group(config, _schema(), "")


def shown(value: Any) -> str:
  """A value for a message: one line, not too long."""
  text = " ".join(repr(value).split())
  return text if len(text) <= 80 else f"{text[:77]}..."


@functools.cache
def _schema() -> ml_collections.ConfigDict:
  return config_lib.default()


def _check_group(config: Any, schema: ml_collections.ConfigDict, path: str) -> None:
  _check_type(path[:-1], config, ml_collections.ConfigDict)
  for name in config:
    # Of a grafted pair: which fields are there, its name says.
    if name in ("magnitude", "direction") and path.startswith("optimizer."):
      _check_group(config[name], schema, f"{path}{name}.")
    elif name == "scope" and path.startswith("optimizer."):
      _check_type(f"{path}{name}", config[name], str)
    elif name not in schema:
      raise UserError(f"{path}{name} is no field of a config; there are {', '.join(schema)}")
    elif isinstance(schema[name], ml_collections.ConfigDict):
      _check_group(config[name], schema[name], f"{path}{name}.")
    elif config[name] is not None or schema[name] is not None:
      _check_type(f"{path}{name}", config[name], schema.get_type(name))
  for name in schema:
    # What an optimizer needs is its own matter: a grafted pair has other fields.
    needed = name == "name" or not path.startswith("optimizer.")
    if needed and schema[name] is not None and name not in config:
      raise UserError(f"{path}{name} is missing from the config")


def _check_type(path: str, value: Any, expected: type) -> None:
  if not _is(value, expected):
    raise UserError(f"{path or 'the config'} is {shown(value)}; allowed: {_KINDS[expected]}")


def _is(value: Any, expected: type) -> bool:
  if expected is int:
    return isinstance(value, int) and not isinstance(value, bool)
  if expected is float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and (isinstance(value, int) or math.isfinite(value)) and abs(value) <= _LARGEST
  if expected is tuple:  # JSON has lists
    return isinstance(value, tuple | list) and all(_is(item, float) for item in value)
  if expected is str:
    return isinstance(value, str) and value.isprintable() and len(value) <= 4096
  return isinstance(value, expected)
