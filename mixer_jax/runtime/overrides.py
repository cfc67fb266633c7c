"""Overrides of a config's fields, of a command line or a study."""

import ast
import functools
import logging
import re
from typing import Any, Iterable, Sequence

from flax import traverse_util
from ml_collections import ConfigDict

from mixer_jax.errors import UserError, as_user_error

_LOG = logging.getLogger(__name__)
_TRUTHS = {"true": True, "false": False}


def override(config: ConfigDict, assignments: Sequence[str]) -> ConfigDict:
  """Sets fields of a config, in place, by "field=value", as a command line does.

  A value is None, True, False, another literal of Python, or a text.

  Args:
    config: the config.
    assignments: texts such as "model.hidden_dim=64".

  Returns:
    The config itself.

  Raises:
    UserError: the config has no such field, or the field takes no value of such a type.

  Example:
    ```python
    from mixer_jax import config as config_lib

    config = config_lib.override(config_lib.default(), ["num_epochs=5", "optimizer.name=adam"])
    assert config.num_epochs == 5
    ```
  """
  for assignment in assignments:
    field, equals, text = assignment.partition("=")
    *groups, leaf = field.split(".")
    try:
      group = functools.reduce(lambda part, name: part[name], groups, config)
      kind = group.get_type(leaf)
    except (KeyError, AttributeError, TypeError) as e:
      raise UserError(f"override {assignment}: the config has no field {field}") from e
    if not equals or kind is ConfigDict:
      raise UserError(f"override {assignment}: allowed: FIELD=VALUE")
    with as_user_error(f"override {assignment}", TypeError, ValueError):
      group[leaf] = _value(text, kind)
  warn_of_epochs(config, [text.partition("=")[0] for text in assignments])
  return config


def _value(text: str, kind: type) -> Any:
  if text == "None":
    return None
  if kind is bool:
    return _TRUTHS.get(text.lower(), text)
  return text if kind is str else _literal(text)


def _literal(text: str) -> Any:
  try:
    return ast.literal_eval(text)
  except (ValueError, SyntaxError):
    return text


def warn_of_epochs(config: ConfigDict, fields: Iterable[str]) -> None:
  """Logs a warning of each overridden number of epochs that a number of steps makes idle."""
  values = traverse_util.flatten_dict(config.to_dict(), sep=".")
  for field in fields:
    steps = re.sub("_epochs$", "_steps", field)
    if steps != field and values.get(field) and values.get(steps):
      _warn(f"{field}={values[field]} has no effect, as {steps} is {values[steps]}; set {steps}=0")


@functools.cache  # the runs of a study are many
def _warn(text: str) -> None:
  _LOG.warning(text)
