"""TFRecord files by record number, without TensorFlow.

A record is its length (uint64), a checksum of that, the content and its checksum, all
little-endian; a checksum is a masked CRC-32C (Castagnoli, RFC 3720):
https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details
"""

import os
import pathlib
from typing import Sequence

import google_crc32c
import numpy as np

_HEADER, _FOOTER = 12, 4  # bytes around a content


class TfRecords:
  """The records of files, one file after the other, with their numbers checked; picklable.

  Raises:
    ValueError: a file is cut short, is no TFRecord file, or holds another number of records.
    OSError: a file cannot be read.
  """

  def __init__(self, paths: Sequence[str | os.PathLike], counts: Sequence[int]):
    self._paths = [pathlib.Path(path) for path in paths]
    starts = [_starts(path, count) for path, count in zip(self._paths, counts, strict=True)]
    self._starts = np.concatenate(starts)
    self._ends = np.cumsum(counts)

  def __len__(self) -> int:
    return len(self._starts)

  def __getitem__(self, i: int) -> bytes:
    """The content of a record; a ValueError if it does not agree with its checksum."""
    path = self._paths[np.searchsorted(self._ends, i, side="right")]
    with path.open("rb") as file:
      file.seek(int(self._starts[i]))
      length = int.from_bytes(file.read(_HEADER)[:8], "little")
      content, footer = file.read(length), file.read(_FOOTER)
    if footer != masked_crc(content):
      raise ValueError(f"{path}: the content of a record is damaged (CRC-32C)")
    return content


def _starts(path: pathlib.Path, count: int) -> np.ndarray:
  """The positions at which the records of a file begin, int64 [count]."""
  size, position, starts = path.stat().st_size, 0, []
  with path.open("rb", buffering=0) as file:  # a buffer would rarely hold the next header
    while position < size:
      file.seek(position)
      header = file.read(_HEADER)
      if header[8:] != masked_crc(header[:8]):
        raise ValueError(f"{path}: no TFRecord file, or damaged at byte {position:,} of {size:,}")
      starts.append(position)
      position += _HEADER + int.from_bytes(header[:8], "little") + _FOOTER
  if position != size or len(starts) != count:
    found = f"{len(starts):,} records of {count:,} end at byte {position:,}"
    raise ValueError(f"{path}: cut short: it has {size:,} bytes, and {found}")
  return np.array(starts, np.int64)


def masked_crc(content: bytes) -> bytes:
  """The checksum of a record or its header."""
  crc = google_crc32c.value(content)
  return ((((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF).to_bytes(4, "little")
