"""The options of pairs of sentences, and their splits as tokens."""

import dataclasses
import logging
import pathlib
from typing import Annotated, ClassVar, Mapping, Sequence

import numpy as np

from mixer_jax.data.dataset import Arrays, Bucketed
from mixer_jax.errors import UserError
from mixer_jax.options import Option
from mixer_jax.text import pairs, sample, text_data
from mixer_jax.text.subwords import Subwords

_LOG = logging.getLogger(__name__)
_VOCABULARY = 'tokenizer.json of byte-level BPE, both languages together; "": the sample\'s'
_SPLIT = '"train" of train.en and train.de below dir, train.tsv, or TFDS split; maybe a part of it'
_BATCH_SHAPES = "most shapes of batches, beside one for the rest of an epoch; each is compiled"
_BATCH_TOKENS = (
  "most tokens of a batch's sources, and of its targets, padding included; batches of sentences of"
  " about one length then have multiples of batch_size; 0: batch_size sentences, padded to max_length"
)


@dataclasses.dataclass(frozen=True)
class AlignedText(text_data.TextData):
  """The group `config.data` of translation."""

  source_language: Annotated[str, Option("language translated from: ending, column or feature")] = (
    "en"
  )
  target_language: Annotated[str, Option("language translated to: ending, column or feature")] = (
    "de"
  )
  train_split: Annotated[str, Option(_SPLIT)] = "train"
  vocabulary: Annotated[str, Option(_VOCABULARY, free=True)] = ""
  max_length: Annotated[int, Option("tokens of a sentence, its end included", 4, 2**14)] = 128
  batch_tokens: Annotated[int, Option(_BATCH_TOKENS, 0)] = 4096
  batch_shapes: Annotated[int, Option(_BATCH_SHAPES, 1, 100)] = 6

  sample_splits: ClassVar[Mapping[str, pathlib.Path]] = sample.PAIRS
  sample_vocabulary: ClassVar[pathlib.Path] = sample.PAIRS_VOCABULARY
  vocabulary_class: ClassVar[type] = Subwords
  vocabulary_kind: ClassVar[str] = "tokenizer.json"
  vocabulary_made: ClassVar[str] = "--kind=bpe --out=bpe.json --size=8000 train.en train.de"

  def check(self) -> None:
    super().check()
    own = (self.source_language, self.target_language)
    if not all(own) or own[0] == own[1]:
      named = f"data.source_language and data.target_language are {own[0]!r} and {own[1]!r}"
      raise UserError(f"{named}; allowed: two different ones")


@dataclasses.dataclass(frozen=True)
class Translated(Arrays):
  """A test set with its translations as they were written."""

  references: Sequence[str]


def load(data: AlignedText, vocabulary: Subwords) -> dict[str, Arrays]:
  """The splits with the arrays of `pairs.Tokens` but "cut"; a UserError if a file is missing.

  Pairs longer than the limit are left out of training, and cut in test sets. A test set is as wide
  as its longest sentences.
  """

  def read(base):
    path, split = data.source(base)
    languages = (data.source_language, data.target_language)
    found = pairs.pairs(path, *languages, split, data.tfds_dir)
    if line := found.summary():
      _LOG.warning("%s: %s", path, line)
    references = {"reference": np.array(found.targets, object)}
    return pairs.encode(found, vocabulary, data.max_length).arrays | references

  splits = text_data.load(data, read, shuffled=True)
  return {name: _finished(name, split.tree, data) for name, split in splits.items()}


def _finished(name: str, tree: Mapping[str, np.ndarray], data: AlignedText) -> Arrays:
  """A split in the form for training, or for tests."""
  if line := pairs.Tokens(tree).summary(data.max_length, left_out=name == "train"):
    _LOG.warning("%s: %s", (data.split_specs | data.further_sets)[name], line)
  arrays = {k: v for k, v in tree.items() if k not in ("cut", "reference")}
  lengths = np.stack([arrays["source_length"], arrays["target_length"]], axis=1)
  if name != "train":
    for side, longest in zip(("source", "target"), lengths.max(0)):
      arrays[side] = arrays[side][:, :longest]
    return Translated(arrays, tuple(tree["reference"]))
  kept = ~tree["cut"]
  if not kept.any():
    raise UserError(f"data.max_length is {data.max_length}: every training pair is longer")
  arrays, lengths = {k: v[kept] for k, v in arrays.items()}, lengths[kept]
  if not data.batch_tokens:
    return Arrays(arrays)
  return Bucketed(arrays, lengths, data.batch_tokens, data.batch_shapes)
