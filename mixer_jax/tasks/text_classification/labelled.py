"""Labelled sentences, or pairs of them, as tokens."""

import dataclasses
import functools
import logging
import re
from typing import Annotated, Mapping, NamedTuple, Sequence

import numpy as np

from mixer_jax.data import splits
from mixer_jax.data.dataset import Arrays
from mixer_jax.errors import UserError
from mixer_jax.options import Option
from mixer_jax.tasks.text import text_data
from mixer_jax.text import rows as rows_lib
from mixer_jax.text import sample, sequences
from mixer_jax.text.vocabulary import Vocabulary

_LOG = logging.getLogger(__name__)
_FRACTION = re.compile(r"-?\d*\.\d+")
_SEVERAL = 20  # rows, from which on labels that stand once are taken for a mistake


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
  data.check_files()
  path_of = lambda base: data.source(base)[0]
  rows = functools.cache(functools.partial(_rows, data))
  bases = dict.fromkeys(splits.base_names(data.train_split, "data.train_split"))
  classes = _classes({path_of(base): rows(base) for base in bases}, data.label)

  def read(base):
    found, length = rows(base), data.max_length
    tokens, cut = sequences.pairs(found.texts, found.pairs, vocabulary, length)
    tell_cut(cut, len(found.texts), path_of(base), length)
    return {**tokens, "label": _numbers(found, classes)}

  arrays = text_data.load(data, read, shuffled=True)
  return Loaded(arrays, sample.CLASS_NAMES if data.name == "sample" else classes)


def _rows(data: LabelledText, base: str) -> rows_lib.Rows:
  path, split = data.source(base)
  columns = (data.text, data.pair, data.label)
  if data.name == "sample":
    columns = (sample.TEXT, "", sample.LABEL)
  return rows_lib.rows(path, *columns, split, data.dir, text_data.OTHERS)


def _classes(found: Mapping[str, rows_lib.Rows], column: str) -> tuple[str, ...]:
  """The classes of the rows of the training files, by path; a UserError if they are none."""
  named, labels = (
    next(iter(found.values())).names,
    [x for rows in found.values() for x in rows.labels],
  )
  if named:
    return tuple(named)
  classes, where = tuple(sorted(set(labels), key=_natural)), " and ".join(found)
  if len(classes) < 2:
    raise UserError(f"{where}: has only the label {classes[0]!r}; allowed: two or more")
  if fractions := [label for label in classes if _FRACTION.fullmatch(label)]:
    mistake = f"column {column!r} holds numbers such as {fractions[0]}"
    raise UserError(f"{where}: {mistake}; allowed: classes, for values are not learned")
  if len(labels) >= _SEVERAL and len(classes) > len(labels) / 2:
    mistake = f"column {column!r} has {len(classes):,} different labels in {len(labels):,} rows"
    raise UserError(f"{where}: {mistake}; allowed: classes, most of them of several rows")
  return classes


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
