"""Tensors in PyTorch's files, read by NumPy: nothing that a file names is imported or called.

`torch.save` writes a pickle and, beside it, the numbers of each storage: as members of an archive, or
behind the pickle in files from before PyTorch 1.6. A pickle names functions and classes. Those that
tensors and dicts are made of stand in this module, and an empty `_Inert` takes the place of any
other: options of argparse, dates, a trainer.
"""

import functools
import io
import logging
import math
import pathlib
import pickle
from typing import Any, Callable, Iterator, Mapping
import zipfile

import jax.numpy as jnp
import numpy as np

from mixer_jax import npz

_LOG = logging.getLogger(__name__)

# Where timm, deit, torchvision and DINO keep a state dict; the first one is taken, as by timm.
_AVERAGED = ("state_dict_ema", "model_ema")
_PLAIN = ("state_dict", "model", "teacher")
_MAGIC = 0x1950A86A20F9469CFC6C  # the first pickle in a file from before PyTorch 1.6


def read(path: pathlib.Path, use_ema: bool = True) -> dict[str, np.ndarray]:
  """The arrays of a file's state dict by name.

  Args:
    use_ema: take the moving average of the weights, if the file has one, and log it.

  Raises:
    Exception: the file is damaged or holds no state dict; a damaged pickle may raise any kind.
  """
  keys = (*_AVERAGED, *_PLAIN) if use_ema else _PLAIN
  if not zipfile.is_zipfile(path):
    return _chosen(path, keys, *_before_archives(path.read_bytes()))
  with zipfile.ZipFile(path) as archive:
    npz.members(archive, path.stat().st_size)
    return _chosen(path, keys, *_zipped(archive))


def _chosen(
  path: pathlib.Path, keys: tuple[str, ...], content: Any, array: Callable[[Any], np.ndarray]
) -> dict[str, np.ndarray]:
  place, state = next(_state_dicts(content, keys), ("", None))
  if state is None:
    raise ValueError("there is no state dict in it")
  if any(key in _AVERAGED for key in place):
    _LOG.info(
      "%s: took the moving average, %s; pretrained.load(..., use_ema=False) takes the others",
      path,
      place[-1],
    )
  return {str(k): array(v) for k, v in state.items() if isinstance(v, _Tensor)}


def _state_dicts(
  content: Any, keys: tuple[str, ...], place: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Mapping[Any, Any]]]:
  """The state dicts in a file and the keys that lead to each; the first one is to be taken."""
  if isinstance(content, Mapping):
    for key in keys:
      yield from _state_dicts(content.get(key), keys, (*place, key))
    if any(isinstance(value, _Tensor) for value in content.values()):
      yield place, content


class _Sealed:
  """An object that a pickle cannot change, nor its class."""

  def __setstate__(*_):
    pass


class _Inert(_Sealed, dict):
  """The place of an object of any other class, or of what such an object returns.

  A dict's own items stay in it, for a state dict may be of a class derived from dict.
  """

  __eq__ = object.__eq__
  __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]  # it may be a key

  def __init__(self, *_, **__):
    super().__init__()

  def __call__(self, *_, **__):
    return _Inert()

  def append(*_):
    pass

  extend = add = append


class _OrderedDict(_Sealed, dict):
  """PyTorch adds versions of modules to it as attributes, which are left out."""


class _Storage(_Sealed):
  """A row of numbers, of a subclass's `dtype`, from number `start` of the bytes called `key`."""

  dtype: np.dtype

  def __init__(self, key: str, start: int):
    self.key, self.start = key, start


class _Tensor(_Sealed):
  """A view of a storage; offset and strides count numbers."""

  def __init__(
    self,
    storage: _Storage,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    *_: Any,
  ):
    self.storage, self.offset, self.shape, self.strides = storage, offset, shape, strides

  def array(self, content: bytes | memoryview) -> np.ndarray:
    """The view, of the bytes of its storage; NumPy checks that it lies within them."""
    dtype = self.storage.dtype
    size, offset = dtype.itemsize, self.storage.start + self.offset
    if math.prod(self.shape) * size > len(content):
      raise ValueError(f"a tensor of shape {self.shape} is larger than its storage")
    strides = [n * size for n in self.strides]
    return np.ndarray(self.shape, dtype, content, offset * size, strides)


class _Parameter(_Sealed):
  def __new__(cls, tensor: Any, *_: Any) -> Any:
    return tensor


class _OfType(_Sealed):
  """A tensor of a derived class."""

  def __new__(cls, make: Callable[..., Any], kind: Any, arguments: Any, *_: Any) -> Any:
    return make(*arguments)


_DTYPES = dict(Float="<f4", Double="<f8", Half="<f2", BFloat16=jnp.bfloat16, Long="<i8", Int="<i4")
_DTYPES |= dict(
  Short="<i2", Char="i1", Byte="u1", Bool="?", ComplexFloat="<c8", ComplexDouble="<c16"
)
_GLOBALS = {
  **{
    ("torch", f"{name}Storage"): type(name, (_Storage,), {"dtype": np.dtype(dtype)})
    for name, dtype in _DTYPES.items()
  },
  ("torch._utils", "_rebuild_tensor"): _Tensor,
  ("torch._utils", "_rebuild_tensor_v2"): _Tensor,
  ("torch._utils", "_rebuild_parameter"): _Parameter,
  ("torch._utils", "_rebuild_parameter_with_state"): _Parameter,
  ("torch._tensor", "_rebuild_from_type"): _OfType,
  ("torch._tensor", "_rebuild_from_type_v2"): _OfType,
  ("collections", "OrderedDict"): _OrderedDict,
}


class _Unpickler(pickle._Unpickler):
  """Reads a pickle; Python's own class, because C's takes gigabytes for a place that a file claims.

  Attributes:
    sizes: bytes of a number of each storage that the pickle names, by its key.
  """

  def __init__(self, file: io.BytesIO):
    super().__init__(file, encoding="utf-8")
    self.sizes: dict[str, int] = {}

  def find_class(self, module: str, name: str) -> Any:
    return _GLOBALS.get((module, name), _Inert)

  def persistent_load(self, pid: tuple[Any, ...]) -> Any:
    match pid:
      case "storage", type() as kind, key, _, _, *view if issubclass(kind, _Storage):
        self.sizes[str(key)] = kind.dtype.itemsize
        return kind(str(key), view[0][1] if view and view[0] else 0)
      case "storage", _, key, _, _, *_:
        self.sizes[str(key)] = 1  # PyTorch counts bytes where it does not know the kind of number
    return _Inert()


def _zipped(archive: zipfile.ZipFile) -> tuple[Any, Callable[[_Tensor], np.ndarray]]:
  """The pickled object, and how to read a tensor in it."""
  pickled = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
  root = pickled.removesuffix("data.pkl")
  storage = functools.cache(lambda key: archive.read(f"{root}data/{key}"))  # checks its CRC-32
  content = _Unpickler(io.BytesIO(archive.read(pickled))).load()
  return content, lambda tensor: tensor.array(storage(tensor.storage.key))


def _before_archives(whole: bytes) -> tuple[Any, Callable[[_Tensor], np.ndarray]]:
  """As `_zipped`, of a row of pickles: magic number, version, system, object, keys; then storages."""
  file = io.BytesIO(whole)
  if (magic := _Unpickler(file).load()) != _MAGIC:
    raise ValueError(f"it is a pickle, but none of PyTorch's: it holds a {type(magic).__name__}")
  for _ in ("version", "system"):
    _Unpickler(file).load()
  reader = _Unpickler(file)
  content, storages = reader.load(), {}
  for key in map(str, _Unpickler(file).load()):
    size = int.from_bytes(file.read(8), "little") * reader.sizes[key]
    begin = file.tell()
    storages[key] = memoryview(whole)[begin : begin + size]
    file.seek(size, io.SEEK_CUR)
  return content, lambda tensor: tensor.array(storages[tensor.storage.key])
