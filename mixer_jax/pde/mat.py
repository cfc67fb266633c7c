"""A strict reader of MATLAB's .mat files of versions 5 to 7.2.

SciPy's reader takes down the process when some bytes of a file are wrong. Source of the format:
MathWorks, MAT-File Format, level 5.
"""

import math
import mmap
import os
import struct
from typing import NamedTuple
import zlib

import numpy as np

_HDF5 = "is of version 7.3, which is HDF5 and not read; save it with -v7, or as .npz"
_MATRIX, _COMPRESSED = 14, 15
_STORED = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}  # fmt: skip
_CLASSES = {6: "f8", 7: "f4", 8: "i1", 9: "u1", 10: "i2", 11: "u2", 12: "i4", 13: "u4", 14: "i8", 15: "u8"}  # fmt: skip
_COMPLEX, _OPAQUE = 0x800, 17
_PREFIX = 1024  # bytes, more than the header of an array
_MAX_RATIO = 1032  # deflate shrinks nothing further


class _Array(NamedTuple):
  """What comes before the numbers of an array, and where these begin."""

  name: str
  shape: tuple[int, ...]
  dtype: str  # "" if there are no real numbers
  start: int


class Mat:
  """The arrays of a .mat file, read one at a time; a ValueError, one line, if it is damaged."""

  def __init__(self, path: str | os.PathLike):
    with open(path, "rb") as file:
      if not os.fstat(file.fileno()).st_size:
        raise ValueError("the file is empty")
      self._data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    mark = bytes(self._data[124:128])
    if mark in (b"\x00\x02IM", b"\x02\x00MI"):
      raise ValueError(_HDF5)
    if mark not in (b"\x00\x01IM", b"\x01\x00MI"):
      raise ValueError("is no .mat of version 5 to 7.2; save it with -v7")
    self._order = "<" if mark.endswith(b"IM") else ">"
    self._byte_order = "little" if self._order == "<" else "big"
    self._elements = {}
    offset = 128
    while offset < len(self._data):
      kind, begin, offset = self._tag(self._data, offset)
      if kind not in (_MATRIX, _COMPRESSED):
        raise ValueError(f"has an element of kind {kind}")
      compressed = kind == _COMPRESSED
      content = self._data[begin if compressed else begin - 8 : offset]
      array = self._array(_inflated(content, _PREFIX)[0] if compressed else content)
      if array.name in self._elements:
        raise ValueError(f"has {array.name!r} twice")
      if array.name:  # else MATLAB's own
        self._elements[array.name] = compressed, content
    self.names = tuple(self._elements)

  def read(self, name: str) -> np.ndarray:
    """An array; a ValueError if it is damaged, or does not have real numbers."""
    compressed, data = self._elements[name]
    if compressed:
      _, _, size = self._tag(_inflated(data, 8)[0], 0, whole=False)
      if size > len(data) * _MAX_RATIO:
        raise ValueError(f"cannot have {size} bytes")
      # One byte more than there is makes zlib compare its checksum.
      data, whole = _inflated(data, size + 1)
      if len(data) != size or not whole:
        raise ValueError("is cut off or too long")
    array = self._array(data)
    if not array.dtype:
      raise ValueError("is no array of real numbers")
    stored, begin, end = self._tag(data, array.start)
    if stored not in _STORED:
      raise ValueError(f"has numbers of kind {stored}")
    if math.prod(array.shape) * np.dtype(_STORED[stored]).itemsize != end - begin:
      raise ValueError(f"has {end - begin} bytes, not those of {list(array.shape)}")
    flat = np.frombuffer(data[begin:end], self._order + _STORED[stored])
    with np.errstate(all="ignore"):
      return flat.astype(array.dtype).reshape(array.shape, order="F")

  def _tag(self, data: memoryview, at: int, whole: bool = True) -> tuple[int, int, int]:
    """The kind of the element at an offset, and where its content begins and ends."""
    if at + 8 > len(data):
      raise ValueError("is cut off")
    kind, size = struct.unpack_from(self._order + "II", data, at)
    begin = at + 8
    if kind >> 16:  # small: sizes and content share eight bytes
      kind, size, begin = kind & 0xFFFF, kind >> 16, at + 4
      if size > 4:
        raise ValueError(f"has a small element of {size} bytes")
    if whole and begin + size > len(data):
      raise ValueError("is cut off")
    return kind, begin, begin + size

  def _array(self, data: memoryview) -> _Array:
    """Parses the beginning of an array, whose tag comes first."""
    kind, at, _ = self._tag(data, 0, whole=False)
    if kind != _MATRIX:
      raise ValueError(f"has an element of kind {kind} for an array")

    def part(wanted):
      nonlocal at
      kind, begin, end = self._tag(data, at)
      if kind != wanted:
        raise ValueError(f"has an element of kind {kind} for one of {wanted}")
      at += -(-(end - at) // 8) * 8  # a multiple of eight
      return bytes(data[begin:end])

    flags = part(6)
    # An object of MATLAB, such as a string or a table, has no shape.
    shape = b"" if int.from_bytes(flags[:4], self._byte_order) & 0xFF == _OPAQUE else part(5)
    name = part(1)
    if len(flags) != 8 or len(shape) % 4 or not name.isascii():
      raise ValueError("has an array without flags, shape or name")
    (flags, _), shape = (struct.unpack(f"{self._order}{len(p) // 4}I", p) for p in (flags, shape))
    dtype = "" if flags & _COMPLEX else _CLASSES.get(flags & 0xFF, "")
    return _Array(name.decode(), shape, dtype, at)


def _inflated(content: memoryview, most: int) -> tuple[memoryview, bool]:
  """At most so many bytes of compressed ones, and whether these were all and have their sum."""
  inflate = zlib.decompressobj()
  try:
    return memoryview(inflate.decompress(content, most)), inflate.eof
  except zlib.error as error:
    raise ValueError(f"cannot be decompressed: {error}") from error
