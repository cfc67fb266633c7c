"""Trains a WordPiece vocabulary.

python -m mixer_jax.text --out=vocab.txt [--size=8000] [--cased] [--field=text] [--paragraphs]
    FILE_OR_FOLDER ...
"""

import pathlib
import time
from typing import Iterator

from absl import flags

from mixer_jax.errors import UserError
from mixer_jax.runtime import cli
from mixer_jax.text.documents import documents
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


def main(argv: list[str]) -> None:
  options = flags.FLAGS
  if not options.out:
    raise UserError("--out is missing; for example --out=vocab.txt")
  if not pathlib.Path(options.out).expanduser().absolute().parent.is_dir():
    raise UserError(f"--out={options.out}: its folder does not exist")
  if not argv[1:]:
    raise UserError("files of text are missing; for example texts/ or train.txt")
  start = time.monotonic()
  texts = _Counted([documents(path, options.field, options.paragraphs) for path in argv[1:]])
  made = Vocabulary.train(texts, options.size, not options.cased, options.min_frequency)
  made.save(options.out)
  seconds = time.monotonic() - start
  print(f"{options.out}: {made.size:,} entries from {texts.words:,} words in {seconds:.1f} s")


if __name__ == "__main__":
  flags.DEFINE_string("out", None, "File of the vocabulary, one entry a line.")
  flags.DEFINE_integer("size", 8000, "Entries at most.", lower_bound=1, upper_bound=2**20)
  flags.DEFINE_integer("min_frequency", 2, "Of two entries that become one.", lower_bound=1)
  flags.DEFINE_bool("cased", False, "Keep capitals and accents.")
  flags.DEFINE_string("field", "text", "Column of tables that has the text.")
  flags.DEFINE_bool("paragraphs", False, "Blank lines separate the documents of a .txt.")
  cli.run(main, arguments=True)
