"""Overrides of a config's fields, of a command line or a study."""

import functools
import logging
import re
from typing import Iterable

from flax import traverse_util
from ml_collections import ConfigDict

_LOG = logging.getLogger(__name__)
# As absl and ml_collections word a value that a field does not take, by the type of the field.
_UNFIT = re.compile(r"flag --config\.([\w.]+)=(.*?): (.*)", re.DOTALL)
_WORDS = {
  "invalid literal for int": "an integer",
  "could not convert string to float": "a number",
  "Non-boolean argument": "True or False",
  "as a ConfigDict": "a value for one of its fields, as in {0}.FIELD=VALUE",
}


def unfit(message: str) -> str:
  """The field, its value and the kind that is allowed, of an override's error; "": of another."""
  if found := _UNFIT.match(message):
    for words, allowed in _WORDS.items():
      if words in found[3]:
        return f"{found[1]} is {found[2]!r}; allowed: {allowed.format(found[1])}"
  return ""


def clear(config: ConfigDict, field: str) -> None:
  """Sets a field, such as "model.patch_size", to None; a KeyError if there is none."""
  *groups, leaf = field.split(".")
  for name in groups:
    config = config[name]
  _ = config[leaf]
  with config.ignore_type():
    config[leaf] = None


def tell_epochs(config: ConfigDict, fields: Iterable[str]) -> None:
  """Logs a warning of each overridden number of epochs that a number of steps makes idle."""
  values = traverse_util.flatten_dict(config.to_dict(), sep=".")
  for field in fields:
    steps = re.sub("_epochs$", "_steps", field)
    if steps != field and values.get(field) and values.get(steps):
      _warn(f"{field}={values[field]} has no effect, as {steps} is {values[steps]}; set {steps}=0")


@functools.cache  # the runs of a study are many
def _warn(text: str) -> None:
  _LOG.warning(text)
