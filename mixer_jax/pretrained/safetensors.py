"""A strict reader of `.safetensors`: eight bytes with the length of a JSON header,
the header (name -> dtype, shape, range of bytes), then the numbers.

Written here, because it is short, needs no package, and what a file says of
itself is checked as the format's own library does: the ranges lie in the file,
in their order, without gap or overlap, and have the size of their arrays.
"""

import json
import math
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np

# The limit of the format's own library.
_MAX_HEADER = 100_000_000
_DTYPES = {
  "F64": np.dtype("<f8"),
  "F32": np.dtype("<f4"),
  "F16": np.dtype("<f2"),
  "BF16": np.dtype(jnp.bfloat16),
}


def read(path: pathlib.Path) -> dict[str, np.ndarray]:
  """All arrays of a file by name, as they are stored.

  Raises:
    ValueError: the file breaks the format, or holds other than floating-point
      numbers of 16 to 64 bits.
    OSError: it cannot be read.
  """
  size = path.stat().st_size
  with path.open("rb") as file:
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(size - 8, _MAX_HEADER):
      raise ValueError(f"the header would be {length} bytes of a file of {size}")
    header = _parse(file.read(length))
    header.pop("__metadata__", None)
    arrays, at = {}, 0
    for name, spec in sorted(header.items(), key=lambda item: _range(*item)):
      begin, end = _range(name, spec)
      dtype, shape = _dtype_and_shape(name, spec)
      if begin != at:
        raise ValueError(f"{name} begins at byte {begin} of the data, not at {at}")
      if end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name} has {end - begin} bytes, not those of {dtype} {shape}")
      if end > size - 8 - length:
        raise ValueError(f"{name} ends at byte {end} of {size - 8 - length}")
      arrays[name] = np.frombuffer(file.read(end - begin), dtype).reshape(shape)
      at = end
  if at != size - 8 - length:
    raise ValueError(f"{size - 8 - length - at} bytes belong to no array")
  return arrays


def _parse(text: bytes) -> dict[str, Any]:
  def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
      raise ValueError("the header has a name twice")
    return dict(pairs)

  try:
    header = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
  except RecursionError as error:
    raise ValueError("the header is nested too deeply") from error
  if not isinstance(header, dict):
    raise ValueError("the header is no JSON object")
  return header


def _range(name: str, spec: Any) -> tuple[int, int]:
  match spec:
    case {"data_offsets": [int(begin), int(end)]} if 0 <= begin <= end:
      return begin, end
  raise ValueError(f"{name} has no range of bytes")


def _dtype_and_shape(name: str, spec: dict[str, Any]) -> tuple[np.dtype, tuple[int, ...]]:
  dtype, shape = spec.get("dtype"), spec.get("shape")
  if dtype not in _DTYPES:
    raise ValueError(f"{name} is of type {dtype}; read are {', '.join(_DTYPES)}")
  if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
    raise ValueError(f"{name} has the shape {shape}")
  return _DTYPES[dtype], tuple(shape)
