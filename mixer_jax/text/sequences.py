"""Token ids of fixed length: documents cut or packed, single texts and pairs.

Positions from a sequence's length on hold [PAD].
"""

import contextlib
import itertools
import logging
import pathlib
import tempfile
from typing import Any, BinaryIO, Iterator, NamedTuple, Sequence

import numpy as np

from mixer_jax.data import cache
from mixer_jax.errors import UserError, as_user_error
from mixer_jax.text.documents import Documents
from mixer_jax.text.vocabulary import Vocabulary

MODES = ("cut", "packed")
SHORTEST = 4  # [CLS] a [SEP], and a token to spare
_LOG = logging.getLogger(__name__)
_FORMAT = 2  # raise it when sequences change, so that old cache entries are not read
_CHARACTERS, _DOCUMENTS = 2**20, 4096  # in a chunk, at most
_ROWS = 2**14  # copied at once


class Corpus(NamedTuple):
  """Sequences of documents: {"ids": [n, max_length], "length": int32 [n]}, maybe memory maps."""

  arrays: dict[str, np.ndarray]
  documents: int
  cut: int  # documents that were longer
  dropped: int  # their tokens that are left out

  def summary(self, max_length: int) -> str:
    """A line on the documents that were cut; "" if none was."""
    if not self.cut:
      return ""
    over = f"{self.cut:,} of {self.documents:,} documents are longer than max_length={max_length}"
    return f"{over}: {self.dropped:,} tokens are left out"


class Sequences(NamedTuple):
  """Sequences of texts, and the number of them that were cut.

  `arrays` has "ids" [n, max_length], "length" int32 [n], and "segment_start" int32 [n], the
  position at which the second text begins, max_length if there is none.
  """

  arrays: dict[str, np.ndarray]
  cut: int


def pack(
  documents: Documents,
  vocabulary: Vocabulary,
  max_length: int,
  mode: str = "packed",
  cache_dir: str = "",
) -> Corpus:
  """Encodes documents once, chunk by chunk, into memory-mapped arrays (`data/cache.py`).

  Args:
    documents: more of them than memory holds are allowed.
    max_length: of a sequence, special tokens included, `SHORTEST` or more.
    mode: "cut" makes [CLS] tokens [SEP] of each document and leaves the rest of a long one out.
      "packed" writes documents one after the other, a [SEP] after each, and cuts this into windows
      of max_length - 1, with [CLS] before each; only the last one may be shorter.
    cache_dir: of the cache; "" for its default.

  Raises:
    UserError: a document cannot be read, or there is none.
  """
  place = cache.place(cache_dir)

  def build(allocate: cache.Allocate) -> dict[str, np.ndarray]:
    _LOG.info("Encoding %s", documents.source)
    return _build(documents, vocabulary, max_length, mode, place, allocate)

  identity = (_FORMAT, vocabulary.fingerprint(), max_length, mode)
  key = cache.fingerprint(identity, [(documents.fingerprint(), 0, 0)])
  with as_user_error(f"{documents.source}: its tokens cannot be kept on a disk", OSError):
    arrays = dict(cache.read(place, f"text-{mode}", key, build))
  return Corpus(arrays, *arrays.pop("counts").tolist())


def pairs(
  texts: Sequence[str],
  seconds: Sequence[str] | None,
  vocabulary: Vocabulary,
  max_length: int,
) -> Sequences:
  """[CLS] a [SEP], or [CLS] a [SEP] b [SEP], of each text in memory.

  Of a pair that is too long the longer text loses its last token until it fits, of equally long
  ones the second, as in BERT.
  """
  n, cut = len(texts), 0
  ids = np.full((n, max_length), vocabulary.pad, id_dtype(vocabulary))
  length = np.empty(n, np.int32)
  segment_start = np.full(n, max_length, np.int32)
  for start in range(0, n, _DOCUMENTS):
    rows = range(start, min(start + _DOCUMENTS, n))
    firsts = vocabulary.encode(texts[start : rows.stop], parallel=True)
    others = vocabulary.encode(seconds[start : rows.stop], parallel=True) if seconds else firsts
    for i, a, b in zip(rows, firsts, others, strict=True):
      before = len(a) + (len(b) if seconds else 0)
      if seconds:
        a, b = _shortened(a, b, max_length - 3)
        segment_start[i] = len(a) + 2
        tokens = [vocabulary.cls, *a, vocabulary.sep, *b, vocabulary.sep]
      else:
        tokens = [vocabulary.cls, *a[: max_length - 2], vocabulary.sep]
      ids[i, : len(tokens)] = tokens
      length[i] = len(tokens)
      cut += len(tokens) - (3 if seconds else 2) < before
  return Sequences({"ids": ids, "length": length, "segment_start": segment_start}, cut)


def id_dtype(vocabulary: Any) -> type:
  """The smallest type of arrays of ids of a vocabulary."""
  return np.uint16 if vocabulary.size <= 2**16 else np.int32


def _shortened(a: np.ndarray, b: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
  large = room - room // 2
  first = len(a) if len(a) + len(b) <= room else min(len(a), max(large, room - len(b)))
  return a[:first], b[: room - first]


def _build(
  documents: Documents,
  vocabulary: Vocabulary,
  max_length: int,
  mode: str,
  place: pathlib.Path,
  allocate: cache.Allocate,
) -> dict[str, np.ndarray]:
  """Encodes into a file whose size need not be known, then copies it into the arrays."""
  counts, lengths, dtype = np.zeros(3, np.int64), [], id_dtype(vocabulary)
  make = _cut if mode == "cut" else _packed
  with _spool(place) as file:
    for rows, length in make(documents, vocabulary, max_length, counts):
      file.write(rows.astype(dtype).tobytes())
      lengths.append(length)
    if not (n := sum(map(len, lengths))):
      raise UserError(f"{documents.source}: has no text")
    ids = allocate("ids", (n, max_length), dtype)
    file.seek(0)
    for start in range(0, n, _ROWS):
      chunk = ids[start : start + _ROWS]
      chunk[:] = np.frombuffer(file.read(chunk.nbytes), dtype).reshape(chunk.shape)
  found = {"ids": ids, "length": allocate("length", (n,), np.int32)}
  found["counts"] = allocate("counts", (3,), np.int64)
  found["length"][:], found["counts"][:] = np.concatenate(lengths), counts
  return found


# Rows of ids, int32 [k, max_length], and their lengths, int32 [k].
_Chunk = tuple[np.ndarray, np.ndarray]


def _cut(
  documents: Documents, vocabulary: Vocabulary, max_length: int, counts: np.ndarray
) -> Iterator[_Chunk]:
  """A row of each document. It counts documents, those that are cut, and their lost tokens."""
  room = max_length - 2
  for encoded in _encoded(documents, vocabulary, counts):
    rows = _empty(len(encoded), vocabulary, max_length)
    for row, tokens in zip(rows, encoded):
      kept = min(len(tokens), room)
      row[1 : kept + 1], row[kept + 1] = tokens[:kept], vocabulary.sep
      counts[1:] += kept < len(tokens), len(tokens) - kept
    yield rows, np.array([min(len(x), room) + 2 for x in encoded], np.int32)


def _packed(
  documents: Documents, vocabulary: Vocabulary, max_length: int, counts: np.ndarray
) -> Iterator[_Chunk]:
  """Windows of the documents one after the other. It counts documents."""
  width, end = max_length - 1, np.array([vocabulary.sep], np.int32)
  rest = np.empty(0, np.int32)
  for encoded in _encoded(documents, vocabulary, counts):
    stream = np.concatenate([rest, *itertools.chain(*((x, end) for x in encoded))])
    rows = _empty(n := len(stream) // width, vocabulary, max_length)
    rows[:, 1:] = stream[: n * width].reshape(n, width)
    rest = stream[n * width :]
    yield rows, np.full(n, max_length, np.int32)
  rows = _empty(min(len(rest), 1), vocabulary, max_length)
  rows[:, 1 : len(rest) + 1] = rest
  yield rows, np.full(len(rows), len(rest) + 1, np.int32)


def _empty(n: int, vocabulary: Vocabulary, max_length: int) -> np.ndarray:
  rows = np.full((n, max_length), vocabulary.pad, np.int32)
  rows[:, 0] = vocabulary.cls
  return rows


def _encoded(
  documents: Documents, vocabulary: Vocabulary, counts: np.ndarray
) -> Iterator[list[np.ndarray]]:
  """The ids of some documents at once, without those that have none."""
  for texts in _grouped(documents):
    encoded = [x for x in vocabulary.encode(texts, parallel=True) if len(x)]
    counts[0] += len(encoded)
    yield encoded


def _grouped(documents: Documents) -> Iterator[list[str]]:
  """Documents in lists that are neither long nor have many characters."""
  texts, characters = [], 0
  for text in documents:
    texts.append(text)
    characters += len(text)
    if characters >= _CHARACTERS or len(texts) >= _DOCUMENTS:
      yield texts
      texts, characters = [], 0
  if texts:
    yield texts


@contextlib.contextmanager
def _spool(place: pathlib.Path) -> Iterator[BinaryIO]:
  """A nameless file beside the cache, where there is room, or in the system's place for them."""
  try:
    file = tempfile.TemporaryFile(dir=place)
  except OSError:
    file = tempfile.TemporaryFile()
  with file:
    yield file
