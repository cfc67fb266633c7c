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
    max_length: of a sequence, special tokens included, at least `SHORTEST`.
    mode: "cut" makes [CLS] tokens [SEP] of each document and leaves the rest of a long one out.
      "packed" writes documents one after the other, a [SEP] after each, and cuts this into windows
      of max_length - 1, with [CLS] before each; only the last one may be shorter.
    cache_dir: of the cache; "" for its default.

  Raises:
    UserError: a document cannot be read, or there is none.
    ValueError: of a mode or length that is not allowed.
  """
  if mode not in MODES:
    raise ValueError(f"mode is {mode!r}; allowed: {', '.join(MODES)}")
  _check_length(max_length)
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
  ones the second, as in BERT. A ValueError if max_length is less than `SHORTEST`.
  """
  _check_length(max_length)
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


def _check_length(max_length: int) -> None:
  if max_length < SHORTEST:
    raise ValueError(f"max_length is {max_length}; allowed: at least {SHORTEST}")


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
  make = _Cut if mode == "cut" else _Packed
  maker, lengths, dtype = make(vocabulary, max_length), [], id_dtype(vocabulary)
  with _spool(place) as file:
    for rows, length in maker.chunks(documents):
      file.write(rows.astype(dtype).tobytes())
      lengths.append(length)
    if not (n := sum(map(len, lengths))):
      raise UserError(f"{documents.source}: has no text")
    ids = allocate("ids", (n, max_length), dtype)
    file.seek(0)
    for start in range(0, n, _ROWS):
      chunk = ids[start : start + _ROWS]
      chunk[:] = np.frombuffer(file.read(chunk.nbytes), dtype).reshape(chunk.shape)
  length, counts = allocate("length", (n,), np.int32), allocate("counts", (3,), np.int64)
  length[:], counts[:] = np.concatenate(lengths), maker.counts
  return {"ids": ids, "length": length, "counts": counts}


class _Maker:
  """Makes sequences of documents, chunk by chunk, and counts documents, cut ones, lost tokens."""

  def __init__(self, vocabulary: Vocabulary, max_length: int):
    self._vocabulary, self._max_length = vocabulary, max_length
    self.counts = np.zeros(3, np.int64)

  def chunks(self, documents: Documents) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Ids, int32 [k, max_length], and lengths, int32 [k]."""
    for texts in _grouped(documents):
      encoded = [x for x in self._vocabulary.encode(texts, parallel=True) if len(x)]
      self.counts[0] += len(encoded)
      yield self._rows(encoded)
    yield self._last()

  def _empty(self, n: int) -> np.ndarray:
    rows = np.full((n, self._max_length), self._vocabulary.pad, np.int32)
    rows[:, 0] = self._vocabulary.cls
    return rows

  def _rows(self, encoded: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]: ...

  def _last(self) -> tuple[np.ndarray, np.ndarray]:
    return self._empty(0), np.empty(0, np.int32)


class _Cut(_Maker):
  def _rows(self, encoded):
    rows, room = self._empty(len(encoded)), self._max_length - 2
    for row, tokens in zip(rows, encoded):
      kept = min(len(tokens), room)
      row[1 : kept + 1], row[kept + 1] = tokens[:kept], self._vocabulary.sep
      self.counts[1:] += kept < len(tokens), len(tokens) - kept
    return rows, np.array([min(len(x), room) + 2 for x in encoded], np.int32)


class _Packed(_Maker):
  _rest = np.empty(0, np.int32)

  def _rows(self, encoded):
    end = np.array([self._vocabulary.sep], np.int32)
    stream = np.concatenate([self._rest, *itertools.chain(*((x, end) for x in encoded))])
    n, width = len(stream) // (self._max_length - 1), self._max_length - 1
    rows = self._empty(n)
    rows[:, 1:] = stream[: n * width].reshape(n, width)
    self._rest = stream[n * width :]
    return rows, np.full(n, self._max_length, np.int32)

  def _last(self):
    rows = self._empty(min(len(self._rest), 1))
    rows[:, 1 : len(self._rest) + 1] = self._rest
    return rows, np.full(len(rows), len(self._rest) + 1, np.int32)


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
