"""Trains a vocabulary: WordPiece, or byte pairs for translation.

python -m mixer_jax.text --out=vocab.txt [--size=8000] [--cased] [--field=text] [--paragraphs]
    FILE_OR_FOLDER ...
python -m mixer_jax.text --kind=bpe --out=bpe.json [--size=8000] train.en train.de
python -m mixer_jax.text --kind=bpe --out=bpe.json [--size=8000] --field=en,de pairs.tsv
"""

import itertools
import time
from typing import Iterable, Iterator, Sequence

from absl import flags

from mixer_jax.errors import UserError
from mixer_jax.paths import user_path
from mixer_jax.runtime import cli
from mixer_jax.text import tables
from mixer_jax.text.documents import documents, files
from mixer_jax.text.subwords import Subwords
from mixer_jax.text.vocabulary import Vocabulary


class _Counted:
  """Documents of several sources, and the number of words of the last time they were read."""

  def __init__(self, sources):
    self._sources, self.words = sources, 0

  def __iter__(self) -> Iterator[str]:
    self.words = 0
    for source in self._sources:
      for text in source:
        self.words += len(text.split())
        yield text


class _Lines:
  """A file of sentences, a line each, that has any other ending, such as train.de.gz."""

  def __init__(self, path: str):
    self._path = user_path(path).absolute()

  def __iter__(self) -> Iterator[str]:
    return (line for _, line in tables.lines(self._path) if line.strip())


def _sources(path: str, fields: str, paragraphs: bool) -> list[Iterable[str]]:
  """The texts of a file or folder, by field."""
  if "," in fields and (plain := [x for x in files(path) if tables.kind(x) == ".txt"]):
    why = f"{', '.join(tables.COLUMNS)}, not {plain[0]}"
    raise UserError(f"--field={fields} names several columns; allowed: files of tables, {why}")
  if user_path(path).is_file() and not path.lower().endswith(tables.ENDINGS):
    return [_Lines(path)]
  return [documents(path, field.strip(), paragraphs) for field in fields.split(",")]


def _check_out(out: str, paths: Sequence[str]) -> None:
  """Raises a UserError if no file can be written there, or it would be one of the texts."""
  target = user_path(out).resolve()
  if not target.parent.is_dir():
    raise UserError(f"--out={out}: its folder does not exist")
  if target.is_dir():
    raise UserError(f"--out={out}: is a folder; allowed: a file")
  for path in paths:
    text = user_path(path).resolve()
    inside = (
      text.is_dir() and text in target.parents and target.name.lower().endswith(tables.ENDINGS)
    )
    if inside or text == target:
      raise UserError(f"--out={out}: would be a text of {path}; allowed: a file outside")


def main(argv: list[str]) -> None:
  options = flags.FLAGS
  if not options.out:
    raise UserError("--out is missing; for example --out=vocab.txt")
  if not argv[1:]:
    raise UserError("files of text are missing; for example texts/ or train.txt")
  _check_out(options.out, argv[1:])
  start = time.monotonic()
  sources = (_sources(path, options.field, options.paragraphs) for path in argv[1:])
  texts = _Counted(list(itertools.chain(*sources)))
  if options.kind == "bpe":
    made = Subwords.train(texts, options.size, options.min_frequency)
  else:
    made = Vocabulary.train(texts, options.size, not options.cased, options.min_frequency)
  made.save(options.out)
  seconds = time.monotonic() - start
  print(f"{options.out}: {made.size:,} entries from {texts.words:,} words in {seconds:.1f} s")


if __name__ == "__main__":
  kinds = ["wordpiece", "bpe"]
  flags.DEFINE_enum("kind", "wordpiece", kinds, "WordPiece, or byte pairs that keep texts whole.")
  flags.DEFINE_string("out", None, "File: one entry a line or, of byte pairs, a tokenizer.json.")
  flags.DEFINE_integer("size", 8000, "Entries at most.", lower_bound=1, upper_bound=2**20)
  flags.DEFINE_integer("min_frequency", 2, "Of two entries that become one.", lower_bound=1)
  flags.DEFINE_bool("cased", False, "Keep capitals and accents.")
  flags.DEFINE_string("field", "text", "Column of tables that has the text; or several: en,de.")
  flags.DEFINE_bool("paragraphs", False, "Blank lines separate the documents of a .txt.")
  cli.run(main, arguments=True)
