"""Arrays out of `.npz`, `.safetensors` and PyTorch files, told apart by content.

Nothing is unpickled: NumPy refuses object arrays, and PyTorch reads weights only.
"""

import pathlib
import struct
from typing import Any, Iterator, Mapping
import zipfile
import zlib

import jax.numpy as jnp
import numpy as np

from mixer_jax.errors import UserError
from mixer_jax.pretrained import npz, safetensors

_KINDS = ".npz, .safetensors and PyTorch's .pth are read"
# PyTorch before 2.6 could be tricked into running code even when it reads weights only.
_MIN_TORCH = (2, 6)


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
    except zipfile.BadZipFile as error:
      raise UserError(f"{path}: is damaged or cut off: {error}") from error
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
  except (
    OSError, ValueError, TypeError, EOFError, MemoryError, struct.error, zlib.error,
    zipfile.BadZipFile, NotImplementedError, RuntimeError,
  ) as error:  # fmt: skip
    reason = (str(error) or type(error).__name__).splitlines()[0]
    raise UserError(f"{path}: is damaged or no plain weights: {reason}") from error
  if not arrays:
    raise UserError(f"{path}: holds no arrays")
  wrong = [name for name, array in arrays.items() if not np.isfinite(array).all()]
  if wrong:
    raise UserError(f"{path}: not all numbers are finite in {', '.join(wrong)}")
  return arrays, notes


def _float32(name: str, array: np.ndarray) -> np.ndarray:
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
  try:
    content = torch.load(path, map_location="cpu", weights_only=True)
  except Exception as error:  # a damaged or hostile pickle raises anything
    reason = (str(error) or type(error).__name__).splitlines()[0]
    raise ValueError(f"PyTorch does not read it as weights only: {reason}") from error
  state = next(_state_dicts(torch, content), None)
  if state is None:
    raise ValueError("there is no state dict in it")
  arrays = {}
  for name, value in state.items():
    if not (isinstance(value, torch.Tensor) and value.is_floating_point()):
      raise ValueError(f"{name} is no tensor of floating-point numbers")
    arrays[str(name)] = value.detach().float().contiguous().numpy()
  return arrays, {}


def _state_dicts(torch: Any, content: Any) -> Iterator[Mapping[str, Any]]:
  """Dicts of tensors: the content itself, or where deit, timm and DINO keep them."""
  if isinstance(content, Mapping):
    if any(isinstance(value, torch.Tensor) for value in content.values()):
      yield content
    for key in ("model", "state_dict", "teacher"):
      yield from _state_dicts(torch, content.get(key))
