"""Labelled sentences, or pairs of them, as tokens."""

import dataclasses
import logging
from typing import Annotated, Mapping, NamedTuple, Sequence

import numpy as np

from mixer_jax.data.dataset import Arrays
from mixer_jax.errors import UserError
from mixer_jax.options import Option
from mixer_jax.tasks.text import text_data
from mixer_jax.text import rows as rows_lib
from mixer_jax.text import sample, sequences
from mixer_jax.text.vocabulary import Vocabulary

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class LabelledText(text_data.TextData):
  """The group `config.data` of a classification of text.

  Files are tables with a header (.tsv, .csv) or JSON lines.
  """

  text: Annotated[str, Option("column, key or feature of the sentence")] = "sentence"
  pair: Annotated[str, Option('likewise, of the second sentence of a pair; "": none')] = ""
  label: Annotated[str, Option("likewise, of the label")] = "label"


class Loaded(NamedTuple):
  """Splits of {"ids": [tokens], "length", "segment_start", "label", "row"}; classes by label."""

  splits: Mapping[str, Arrays]
  class_names: tuple[str, ...]


def load(data: LabelledText, vocabulary: Vocabulary) -> Loaded:
  """Reads the splits; a UserError names an unknown label, or a file that cannot be read."""
  classes: list[str] = []  # those of the base split that is read first, the training split's

  def read(base):
    path, split = data.source(base)
    columns = (data.text, data.pair, data.label)
    if data.name == "sample":
      columns = (sample.TEXT, "", sample.LABEL)
    found = rows_lib.rows(path, *columns, split, data.dir, text_data.OTHERS)
    if not classes:
      classes.extend(found.names or sorted(set(found.labels), key=_natural))
      if len(classes) < 2:
        raise UserError(f"{path}: has only the label {classes[0]!r}; allowed: two or more")
    tokens, cut = sequences.pairs(found.texts, found.pairs, vocabulary, data.max_length)
    tell_cut(cut, len(found.texts), path, data.max_length)
    return {**tokens, "label": _numbers(found, classes)}

  splits = text_data.load(data, read, shuffled=True)
  names = sample.CLASS_NAMES if data.name == "sample" else tuple(classes)
  return Loaded(splits, names)


def tell_cut(cut: int, number: int, where: str, length: int) -> None:
  """Says how many of some examples were too long."""
  if cut:
    longer = f"{cut:,} of {number:,} examples are longer than data.max_length"
    _LOG.warning("%s: %s, %d tokens, and were cut", where, longer, length)


def _natural(label: str) -> tuple[bool, int, str]:
  """The order of labels: numbers by value, before words."""
  return not label.isdecimal(), int(label) if label.isdecimal() else 0, label


def _numbers(found: rows_lib.Rows, classes: Sequence[str]) -> np.ndarray:
  numbers = {name: i for i, name in enumerate(classes)}
  for i, label in enumerate(found.labels):
    if label not in numbers:
      known = ", ".join(classes[:20])
      raise UserError(f"{found.where(i)}: label {label!r} is not one of training: {known}")
  return np.array([numbers[label] for label in found.labels], np.int32)
