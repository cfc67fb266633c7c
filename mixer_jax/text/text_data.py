"""The options of text, and the splits that they name as arrays of tokens."""

import dataclasses
import functools
import logging
import pathlib
from typing import Annotated, Any, Callable, ClassVar, Mapping

import numpy as np

from mixer_jax.data import further, splits
from mixer_jax.data.dataset import Arrays
from mixer_jax.errors import UserError
from mixer_jax.options import Option
from mixer_jax.paths import remembered, user_path
from mixer_jax.text import sample, sequences
from mixer_jax.text.vocabulary import Vocabulary

_OWN_FILES = ("sample", "files")  # TFDS sets keep their own order
_LOG = logging.getLogger(__name__)
_LOOKED_AT = 10_000  # sequences
_MANY_UNKNOWN = 0.1  # of their tokens
_VOCABULARY = "WordPiece file such as BERT's vocab.txt; \"\": the sample's or that of `pretrained`"
_SPLIT = 'file or folder below dir, or TFDS split; maybe a part: "train.tsv[:90%]"'


@dataclasses.dataclass(frozen=True)
class TextData:
  """The fields of `config.data` that all tasks on text have."""

  name: Annotated[str, Option('"sample", "files" or a TFDS name')] = "sample"
  dir: Annotated[str, Option("folder of the files, or TFDS's data_dir", free=True)] = ""
  cache_dir: Annotated[str, Option('of encoded text; "": ~/.cache/mixer_jax', free=True)] = ""
  train_split: Annotated[str, Option(_SPLIT)] = "train"
  test_split: Annotated[str, Option("test set, written as train_split")] = "test"
  validation_split: Annotated[str, Option('picks the checkpoint; "": the test split does')] = ""
  extra_test_splits: Annotated[str, Option("further test sets, separated by commas")] = ""
  test_sets: further.option("a file or folder, as a split below dir, or tfds:NAME[@SPLIT]") = ""
  vocabulary: Annotated[str, Option(_VOCABULARY, free=True)] = ""
  max_length: Annotated[
    int, Option("tokens of a sequence, [CLS] and [SEP] included", sequences.SHORTEST, 2**14)
  ] = 128

  # Each kind of text has its own sample, and its own name and maker of vocabularies.
  sample_splits: ClassVar[Mapping[str, pathlib.Path]] = sample.SPLITS
  sample_vocabulary: ClassVar[pathlib.Path] = sample.VOCABULARY
  vocabulary_class: ClassVar[type] = Vocabulary
  vocabulary_kind: ClassVar[str] = "WordPiece file"
  vocabulary_made: ClassVar[str] = "--out=vocab.txt --size=8000 FILE"

  @property
  def split_specs(self) -> dict[str, str]:
    """The split strings by the name of the split."""
    named = self.train_split, self.test_split, self.validation_split, self.extra_test_splits
    return splits.by_name(*named)

  @property
  def further_sets(self) -> dict[str, further.Place]:
    """Places of the test sets of other sources, by name."""
    return further.places(self.test_sets, {*splits.OWN} | self.split_specs.keys())

  @property
  def tfds_dir(self) -> str:
    """The data_dir of TFDS."""
    return "" if self.name in _OWN_FILES else self.dir

  @property
  def vocabulary_path(self) -> str:
    """The file of the vocabulary; a UserError if none is named."""
    if not self.vocabulary and self.name != "sample":
      made = f"make one of your text: python -m mixer_jax.text {self.vocabulary_made}"
      raise UserError(f"data.vocabulary is ''; name a {self.vocabulary_kind}, or {made}")
    return self.vocabulary or str(self.sample_vocabulary)

  def check(self) -> None:
    """Raises a UserError for a split string that is none, or stands twice, or a `dir` for nothing."""
    if self.dir and self.name == "sample":
      raise UserError(
        f"data.dir is {self.dir!r}, but data.name is 'sample'; allowed: 'files', TFDS"
      )
    splits.check(self.split_specs, self.extra_test_splits)
    _ = self.further_sets

  def check_files(self) -> None:
    """Raises a UserError for a file or folder that is not there, with the field that names it."""
    for name, spec in self.split_specs.items() if self.name == "files" else ():
      for base in splits.base_names(spec, field := splits.field(name)):
        if not pathlib.Path(path := self.source(base)[0]).exists():
          none = '; "": none' if name == "validation" else ""
          raise UserError(f"{field} is {spec!r}: {path!r}: no such file or folder of text{none}")
    for path, split in (place.source for place in self.further_sets.values()):
      if not (split or pathlib.Path(path).exists()):
        raise UserError(f"data.test_sets names {path!r}: no such file or folder of text")

  def source(self, base: str) -> tuple[str, str]:
    """The path and "", or the TFDS name and the split, that a base split is read from."""
    if isinstance(base, further.Place):
      return base.source
    if self.name == "files":
      return str(user_path(self.dir).absolute() / base), ""
    if self.name != "sample":
      return self.name, base
    if base not in self.sample_splits:
      allowed = ", ".join(self.sample_splits)
      raise UserError(f"the sample has no split {base!r}; allowed: {allowed}")
    return str(self.sample_splits[base]), ""


@functools.partial(remembered, number=2)
def vocabulary(kind: type, path: str) -> Any:
  """The vocabulary in a file, of the class `kind`; a UserError if it is none."""
  return kind.read(path)


def load(
  data: TextData, read: Callable[[str], Mapping[str, np.ndarray]], shuffled: bool
) -> dict[str, Arrays]:
  """The splits as arrays [n, ...].

  A UserError if a split string selects nothing, or validation examples are trained on.

  Args:
    read: from a base split to its arrays.
    shuffled: whether a part of a base split is drawn from all over it.
  """
  read = functools.cache(read)
  number = lambda base: len(next(iter(read(base).values())))
  parts = splits.checked_parts(data.split_specs, number, data.further_sets)
  in_order = not shuffled or data.name not in _OWN_FILES
  taken = {k: [(read(base), rows, in_order) for base, rows in v] for k, v in parts.items()}
  return {name: Arrays(splits.joined(chosen)) for name, chosen in taken.items()}


def warn_of_unknown(arrays: Mapping[str, np.ndarray], vocabulary: Vocabulary, where: str) -> None:
  """Warns if many tokens of the first sequences are no entries of a vocabulary."""
  ids, length = arrays["ids"][:_LOOKED_AT], arrays["length"][:_LOOKED_AT]
  real = np.arange(ids.shape[1]) < length[:, None]
  share = np.count_nonzero(real & (ids == vocabulary.unk)) / max(np.count_nonzero(real), 1)
  if share > _MANY_UNKNOWN:
    line = "%s: %.0f%% of the tokens are [UNK], so the model cannot tell them apart; does"
    _LOG.warning(f"{line} data.vocabulary fit the text?", where, 100 * share)
