"""Text as sequences of tokens."""

import dataclasses
import logging
from typing import Annotated, Mapping

import numpy as np

from mixer_jax.data.dataset import Arrays
from mixer_jax.data.further import Place
from mixer_jax.options import Option, one_of
from mixer_jax.text import sample, sequences, text_data
from mixer_jax.text.documents import documents
from mixer_jax.text.vocabulary import Vocabulary

_LOG = logging.getLogger(__name__)
_PACKINGS = '"packed": documents one after the other; "cut": the beginning of each'


@dataclasses.dataclass(frozen=True)
class Corpus(text_data.TextData):
  """The group `config.data` of a language model."""

  field: Annotated[str, Option("column, key or feature that holds the text, if not plain")] = "text"
  paragraphs: Annotated[bool, Option("an empty line ends a document, not each line")] = False
  packing: one_of(_PACKINGS, sequences.MODES) = "packed"


def load(data: Corpus, vocabulary: Vocabulary) -> Mapping[str, Arrays]:
  """Splits of {"ids": integers [tokens], "length": int32, "row": int32, the example's number}.

  A part of a split is contiguous, for neighbours often come from one document. A UserError if a
  file is missing.
  """
  data.check_files()

  def read(base):
    path, split = data.source(base)
    own = data.name == "sample" and not isinstance(base, Place)
    field = sample.TEXT if own else data.field
    found = documents(path, field, data.paragraphs, split, data.tfds_dir)
    packed = sequences.pack(found, vocabulary, data.max_length, data.packing, data.cache_dir)
    if line := packed.summary(data.max_length):
      _LOG.warning("%s: %s", path, line)
    text_data.warn_of_unknown(packed.arrays, vocabulary, path)
    return packed.arrays

  found = text_data.load(data, read, shuffled=False)
  numbered = lambda split: {**split.tree, "row": np.arange(len(split), dtype=np.int32)}
  return {name: Arrays(numbered(split)) for name, split in found.items()}
