"""TFRecord files by record number, without TensorFlow.

A record is its length (uint64), a checksum of that, the content and its checksum, all
little-endian; a checksum is a masked CRC-32C (Castagnoli, RFC 3720):
https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details
"""

import functools
import os
import pathlib
from typing import Any, Sequence

import numpy as np

_HEADER, _FOOTER = 12, 4  # bytes around a content
_BLOCK = 512  # bytes whose checksum is taken in one step
# A register of 0 becomes that with which a CRC-32C begins.
_ALL_ONES = bytes.fromhex("54641f64")


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
    if footer != masked_crc(content).to_bytes(4, "little"):
      raise ValueError(f"{path}: the content of a record is damaged (CRC-32C)")
    return content


def _starts(path: pathlib.Path, count: int) -> np.ndarray:
  """Where the records of a file begin, int64 [count]."""
  size, position, starts, headers = path.stat().st_size, 0, [], []
  with path.open("rb", buffering=0) as file:  # a buffer would rarely hold the next header
    while position < size:
      starts.append(position)
      file.seek(position)
      if whole := len(header := file.read(_HEADER)) == _HEADER:
        headers.append(_ALL_ONES + header)
      position += _HEADER + int.from_bytes(header[: 8 * whole], "little") + _FOOTER
  words = np.frombuffer(b"".join(headers), "<u4").reshape(-1, 4)
  wrong = np.flatnonzero(_masked(~_registers(words[:, :3].view(np.uint8))) != words[:, 3])
  if len(wrong):
    at = f"byte {starts[wrong[0]]:,} of {size:,}"
    raise ValueError(f"{path}: no TFRecord file, or damaged at {at}")
  if position > size:
    end = f"record {len(starts):,} of {count:,} ends at byte {position:,}"
    raise ValueError(f"{path}: cut short: it has {size:,} bytes, but {end}")
  if len(starts) != count:
    found = f"{len(starts):,} records in {size:,} bytes"
    raise ValueError(f"{path}: has {found}, but should hold {count:,}")
  return np.array(starts, np.int64)


def masked_crc(content: bytes) -> int:
  """The checksum of a record or its header, by blocks: Python alone takes seconds a megabyte."""
  content = _ALL_ONES + content
  blocks = np.frombuffer(bytes(-len(content) % _BLOCK) + content, np.uint8).reshape(-1, _BLOCK)
  crc, tables = 0, _table()[:4].tolist()
  for register in _registers(blocks).tolist():
    for table in tables:  # the last block's share at the end of this one
      register ^= table[crc & 0xFF]
      crc >>= 8
    crc = register
  return _masked(~crc & 0xFFFFFFFF)


def _masked(crc: Any) -> Any:
  return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _registers(rows: np.ndarray) -> np.ndarray:
  """CRC-32C's register after the bytes [n, up to _BLOCK] of each row, begun with 0: uint32 [n]."""
  places = 256 * np.arange(_BLOCK - rows.shape[1], _BLOCK)
  return np.bitwise_xor.reduce(_table().ravel().take(rows + places), axis=1)


@functools.cache
def _table() -> np.ndarray:
  """A byte's share of a register, by its place in a block: uint32 [_BLOCK, 256]."""
  one = np.arange(256, dtype=np.uint32)
  for _ in range(8):
    one = (one >> 1) ^ np.where(one & 1, np.uint32(0x82F63B78), np.uint32(0))
  rows = [one]
  for _ in range(_BLOCK - 1):
    rows.append((rows[-1] >> 8) ^ one[rows[-1] & 0xFF])
  return np.stack(rows[::-1])
