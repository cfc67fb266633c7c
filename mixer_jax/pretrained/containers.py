"""Arrays out of `.npz`, `.safetensors` and PyTorch files, told apart by content.

Nothing is unpickled: NumPy refuses object arrays, and PyTorch reads weights only.
"""

import pathlib
from typing import Any, Iterator, Mapping
import warnings
import zipfile

import jax.numpy as jnp
import numpy as np

from mixer_jax import npz as npz_file
from mixer_jax.errors import UserError, reason
from mixer_jax.pretrained import npz, safetensors

_KINDS = ".npz, .safetensors and PyTorch's .pth are read"
# PyTorch before 2.6 could be tricked into running code even when it reads weights only.
_MIN_TORCH = (2, 6)
# Tied parameters share what is stored, a few times.
_MAX_SHARED = 10
# Names in a message, and characters of a name.
_NAMED = 20
_LINE = 200


def kind(path: pathlib.Path) -> str:
  """ "npz", "safetensors" or "torch", by a look at the first bytes.

  Raises:
    UserError: it is none of them.
  """
  with path.open("rb") as file:
    head = file.read(9)
  if not head:
    raise UserError(f"{path}: is empty")
  if head.startswith(b"PK\x03\x04"):
    try:
      with zipfile.ZipFile(path) as archive:
        pickled = any(n.endswith("/data.pkl") for n in archive.namelist())
    except Exception as error:  # a damaged directory makes zipfile raise nearly anything
      raise UserError(f"{path}: is damaged or cut off: {reason(error)}") from error
    return "torch" if pickled else "npz"
  if head[8:] == b"{":
    return "safetensors"
  if head.startswith(b"\x80\x02"):  # a pickle, as PyTorch wrote before 1.6
    return "torch"
  raise UserError(f"{path}: holds no weights: it begins with {head[:8]!r}; {_KINDS}")


def read(path: pathlib.Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
  """Reads a file of weights.

  Returns:
    Its arrays by name, float32, and what `save` noted in it (empty for others).

  Raises:
    UserError: it is damaged, or holds anything but finite floating-point arrays.
  """
  reader = {"npz": npz.read, "safetensors": _read_safetensors, "torch": _read_torch}[kind(path)]
  try:
    arrays, notes = reader(path)
    arrays = {name: _float32(name, array) for name, array in arrays.items()}
  except UserError:
    raise
  except Exception as error:  # what a damaged or hostile file makes a reader raise
    raise UserError(f"{path}: is damaged or no plain weights: {reason(error)}") from error
  if not arrays:
    raise UserError(f"{path}: holds no arrays")
  wrong = [name for name, array in arrays.items() if not np.isfinite(array).all()]
  if wrong:
    more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
    raise UserError(f"{path}: not all numbers are finite in {', '.join(wrong[:_NAMED])}{more}")
  return arrays, notes


def _float32(name: str, array: np.ndarray) -> np.ndarray:
  if not name.isprintable() or len(name) > _LINE:  # it will be part of messages
    raise ValueError(f"{name[:_LINE]!r} is no name of an array")
  if not array.size:
    raise ValueError(f"{name} has no numbers, only the shape {list(array.shape)}")
  if array.dtype == np.dtype("V2"):  # NumPy has no name for bfloat16 in a file
    array = array.view(jnp.bfloat16)
  if not np.issubdtype(array.dtype, np.floating) and array.dtype != jnp.bfloat16:
    raise ValueError(f"{name} holds {array.dtype}, not floating-point numbers")
  with np.errstate(over="ignore"):  # what overflows is infinite, and refused for that
    return np.asarray(array, np.float32)


def _read_safetensors(path: pathlib.Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
  return safetensors.read(path), {}


def _read_torch(path: pathlib.Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
  try:
    import torch
  except ImportError as error:
    raise UserError(
      f"{path}: PyTorch's files need PyTorch (pip install torch); .safetensors files need nothing"
    ) from error
  if tuple(int(n) for n in torch.__version__.split(".")[:2]) < _MIN_TORCH:
    raise UserError(f"{path}: reading it safely needs PyTorch 2.6, this is {torch.__version__}")
  if zipfile.is_zipfile(path):
    with zipfile.ZipFile(path) as archive:
      npz_file.members(archive, path.stat().st_size)
      if wrong := archive.testzip():  # PyTorch does not look at the checksums
        raise ValueError(f"Bad CRC-32 for file {wrong!r}")
  try:
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")  # about pickles that it refuses then
      content = torch.load(path, map_location="cpu", weights_only=True)
  except Exception as error:  # a damaged or hostile pickle raises anything
    raise ValueError(f"PyTorch does not read it as weights only: {reason(error)}") from error
  state = next(_state_dicts(torch, content), None)
  if state is None:
    raise ValueError("there is no state dict in it")
  for name, value in state.items():
    if not (isinstance(value, torch.Tensor) and value.is_floating_point()):
      raise ValueError(f"{name} is no tensor of floating-point numbers")
  _check_views(state)
  return {str(k): v.detach().float().contiguous().numpy() for k, v in state.items()}, {}


def _check_views(state: Mapping[str, Any]) -> None:
  """Refuses tensors that repeat stored numbers: small in a file, of any size in memory."""
  stored, needed = {}, 0
  for name, value in state.items():
    storage, size = value.untyped_storage(), value.numel() * value.element_size()
    if size > storage.nbytes():
      raise ValueError(f"{name} would be {size} bytes of {storage.nbytes()} that are stored")
    stored[storage.data_ptr()] = storage.nbytes()
    needed += size
  if needed > _MAX_SHARED * sum(stored.values()):
    raise ValueError(f"{sum(stored.values())} bytes would become {needed}")


def _state_dicts(torch: Any, content: Any) -> Iterator[Mapping[str, Any]]:
  """Dicts of tensors: the content itself, or where deit, timm and DINO keep them."""
  if isinstance(content, Mapping):
    if any(isinstance(value, torch.Tensor) for value in content.values()):
      yield content
    for key in ("model", "state_dict", "teacher"):
      yield from _state_dicts(torch, content.get(key))
