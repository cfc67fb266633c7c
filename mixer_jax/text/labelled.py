"""Labelled sentences, or pairs of them, as tokens."""

import dataclasses
import functools
import itertools
import logging
import math
from typing import Annotated, Mapping, NamedTuple, Sequence

import numpy as np

from mixer_jax.data import splits
from mixer_jax.data.dataset import Arrays
from mixer_jax.data.order import Sampling
from mixer_jax.errors import UserError
from mixer_jax.options import Option
from mixer_jax.text import records, sample, sequences, text_data
from mixer_jax.text.vocabulary import Vocabulary

_LOG = logging.getLogger(__name__)
_SEVERAL = 20  # rows, from which on different labels for all are taken for a mistake


@dataclasses.dataclass(frozen=True)
class LabelledText(text_data.TextData):
  """The group `config.data` of a classification of text.

  Files are tables with a header (.tsv, .csv) or JSON lines.
  """

  text: Annotated[str, Option("column, key or feature of the sentence")] = "sentence"
  pair: Annotated[str, Option('column of the second sentence of a pair; "": none')] = ""
  label: Annotated[str, Option("column, key or feature of the label")] = "label"
  sampling: Sampling = "example"


class Loaded(NamedTuple):
  """Splits of {"ids": [tokens], "length", "segment_start", "label"}; classes by label."""

  splits: Mapping[str, Arrays]
  class_names: tuple[str, ...]


def load(data: LabelledText, vocabulary: Vocabulary) -> Loaded:
  """Reads the splits; a UserError names an unknown label, or a file that cannot be read."""
  data.check_files()
  path_of = lambda base: data.source(base)[0]
  rows = functools.cache(functools.partial(_rows, data))
  bases = dict.fromkeys(splits.base_names(data.train_split, "data.train_split"))
  classes = _classes([rows(base) for base in bases], data)

  def read(base):
    found, length = rows(base), data.max_length
    tokens, cut = sequences.pairs(found.texts, found.pairs, vocabulary, length)
    warn_of_cut(cut, len(found.texts), path_of(base), length)
    text_data.warn_of_unknown(tokens, vocabulary, path_of(base))
    return {**tokens, "label": _numbers(found, classes)}

  arrays = text_data.load(data, read, shuffled=True)
  return Loaded(arrays, sample.CLASS_NAMES if data.name == "sample" else classes)


def _rows(data: LabelledText, base: str) -> records.Rows:
  path, split = data.source(base)
  columns = (data.text, data.pair, data.label)
  if data.name == "sample":
    columns = (sample.TEXT, "", sample.LABEL)
  return records.rows(path, *columns, split, data.tfds_dir)


def _classes(found: Sequence[records.Rows], data: LabelledText) -> tuple[str, ...]:
  """The classes of the rows of all training files; a UserError if they are none."""
  if found[0].class_names:
    return found[0].class_names
  labels = [label for rows in found for label in rows.labels]
  classes = tuple(sorted(set(labels), key=_natural))
  where = f"data.train_split={data.train_split!r}: column {data.label!r}"
  if len(classes) < 2:
    raise UserError(f"{where} has only the label {classes[0]!r}; allowed: two or more")
  numbers = list(filter(math.isfinite, map(_number, classes)))
  if same := [x for x, y in itertools.pairwise(numbers) if x == y]:
    raise UserError(f"{where} writes the number {same[0]:g} in two ways; allowed: one")
  if len(numbers) == len(classes) and (fractions := [x for x in numbers if x % 1]):
    why = "classes are whole numbers or words, and values are not learned"
    raise UserError(f"{where} has numbers such as {fractions[0]:g}; {why}")
  if len(classes) == len(labels) >= _SEVERAL:
    number = f"{len(labels):,} labels in {len(labels):,} rows"
    raise UserError(f"{where} has {number}, all different; allowed: classes of several rows")
  return classes


def _number(label: str) -> float:
  """The number that a label is; NaN of a word."""
  try:
    return float(label)
  except ValueError:
    return math.nan


def _natural(label: str) -> tuple[bool, float, str]:
  """The order of labels: numbers by value, before words."""
  number = _number(label)
  known = math.isfinite(number)
  return not known, number if known else 0.0, label


def warn_of_cut(cut: int, number: int, where: str, length: int) -> None:
  """Says how many of some examples were too long."""
  if cut:
    longer = f"{cut:,} of {number:,} examples are longer than data.max_length"
    _LOG.warning("%s: %s, %d tokens, and were cut", where, longer, length)


def _numbers(found: records.Rows, classes: Sequence[str]) -> np.ndarray:
  numbers = {name: i for i, name in enumerate(classes)}
  for i, label in enumerate(found.labels):
    if label not in numbers:
      known = ", ".join(classes[:20])
      raise UserError(f"{found.places[i]}: label {label!r} is not one of training: {known}")
  return np.array([numbers[label] for label in found.labels], np.int32)
