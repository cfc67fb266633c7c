"""Sentences and their translations: two aligned files, a table, or TFDS; held in memory."""

import pathlib
from typing import NamedTuple

import numpy as np

from mixer_jax.errors import UserError
from mixer_jax.paths import user_path
from mixer_jax.text import tables
from mixer_jax.text.records import records
from mixer_jax.text.sequences import id_dtype
from mixer_jax.text.subwords import Subwords
from mixer_jax.text.vocabulary import clean

_TABLES = tuple(e for e in tables.ENDINGS if not e.startswith(".txt"))
_PACKED = ("", ".gz", ".xz")
_CHUNK = 2**14  # sentences that are encoded at once
_UNKNOWN = 0.9  # tokens for a byte, from which on a vocabulary knows no words of a language


class Pairs(NamedTuple):
  """Aligned sentences without blanks around them; pairs with an empty one are left out."""

  source: str  # where they are from, for messages
  languages: tuple[str, str]
  sources: list[str]
  targets: list[str]
  empty: int  # pairs that are left out

  def summary(self) -> str:
    """A line on the pairs that are left out; "" if none is."""
    if not self.empty:
      return ""
    number = len(self.sources) + self.empty
    return f"{self.empty:,} of {number:,} pairs have an empty line and are left out"


class Tokens(NamedTuple):
  """Pairs as ids that end with `eos`.

  `arrays` has "source" and "target" [n, max_length], padded, their "source_length" and
  "target_length" int32 [n], and "cut" bool [n], True where a sentence was longer and lost its end.
  """

  arrays: dict[str, np.ndarray]

  def summary(self, max_length: int, left_out: bool) -> str:
    """A line on the pairs that are too long; "" if none is."""
    if not (cut := self.arrays["cut"]).any():
      return ""
    over = f"{cut.sum():,} of {len(cut):,} pairs are longer than max_length={max_length} tokens"
    return f"{over} and {'are left out' if left_out else 'were cut'}"


def pairs(path: str, source: str, target: str, split: str = "", data_dir: str = "") -> Pairs:
  """Reads all pairs; a UserError names a file, and the line, that is not as it has to be.

  Args:
    path: "DIR/train" for DIR/train.en and DIR/train.de, each maybe with .gz or .xz; a table, .tsv
      without quoting, .csv or .jsonl, with the columns `source` and `target`; or a name of TFDS.
    source: the language translated from: the ending of its file, a column, or a feature.
    target: likewise, of the language translated to.
    split: of the TFDS set that `path` names; "" if it is a file.
    data_dir: of prepared TFDS sets; "" for TFDS's default.
  """
  languages, where = (source, target), str(user_path(path).absolute())
  if split or _is_table(where):
    read = records(path, languages, split=split, data_dir=data_dir)
    rows, where = (row for _, row in read), read.source
  else:
    rows = _read_files(where, languages)
  stripped = [(clean(a).strip(), clean(b).strip()) for a, b in rows]
  kept = [pair for pair in stripped if all(pair)]
  if not kept:
    raise UserError(f"{where}: has no pair of sentences")
  sources, targets = map(list, zip(*kept))
  return Pairs(where, languages, sources, targets, len(stripped) - len(kept))


def _is_table(path: str | pathlib.Path) -> bool:
  return str(path).lower().endswith(_TABLES)


def _read_files(stem: str, languages: tuple[str, str]) -> list[tuple[str, str]]:
  paths = [_found(f"{stem}.{language}") for language in languages]
  one, two = ([line for _, line in tables.lines(path)] for path in paths)
  if len(one) != len(two):
    counts = f"{paths[0]} has {len(one):,} lines and {paths[1]} has {len(two):,}"
    raise UserError(f"{counts}; allowed: as many, for line by line they are translations")
  return list(zip(one, two))


def _found(path: str) -> pathlib.Path:
  """The file, or that with .gz or .xz."""
  there = [p for packed in _PACKED if (p := pathlib.Path(path + packed)).is_file()]
  if not there:
    stem = pathlib.Path(path).with_suffix("")
    tables_there = [p.name for p in sorted(stem.parent.glob(f"{stem.name}.*")) if _is_table(p)]
    table = f"; the split may be the table {tables_there[0]!r}" if tables_there else ""
    raise UserError(
      f"{path}: no such file, nor one with .gz or .xz{table}; data.train_split, data.test_split"
      ' and data.validation_split, which may be "", name the files'
    )
  return there[0]


def encode(found: Pairs, vocabulary: Subwords, max_length: int) -> Tokens:
  """Ids of pairs; a UserError if the vocabulary has no words of one of the two languages.

  A vocabulary of bytes knows every text. Of a language whose words it has never seen, a byte takes
  a token.
  """
  arrays, rates = {}, []
  for side, texts in (("source", found.sources), ("target", found.targets)):
    ids = np.full((len(texts), max_length), vocabulary.pad, id_dtype(vocabulary))
    length = np.empty(len(texts), np.int32)
    for start in range(0, len(texts), _CHUNK):
      encoded = vocabulary.encode(texts[start : start + _CHUNK], parallel=True)
      for i, tokens in enumerate(encoded, start):
        kept = tokens[: max_length - 1]
        ids[i, : len(kept)], ids[i, len(kept)], length[i] = kept, vocabulary.eos, len(tokens) + 1
    rates.append((length.sum() - len(texts)) / sum(len(text.encode()) for text in texts))
    arrays |= {side: ids, f"{side}_length": np.minimum(length, max_length)}
    arrays["cut"] = arrays.get("cut", False) | (length > max_length)
  for language, rate, other in zip(found.languages, rates, rates[::-1]):
    if rate > _UNKNOWN >= other:
      raise UserError(
        f"{found.source}: data.vocabulary has no words of the language {language!r}: it takes"
        f" {rate:.2f} tokens a byte; train it on files of both languages"
      )
  return Tokens(arrays)
