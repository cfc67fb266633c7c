"""Weights of one task for another: classes, resolution, patch grid.

Tokens are the patches of a square grid, row by row. Where the grids of a model and
a file differ, the weights over tokens change in one of these ways:

"block_diagonal", as in Appendix C of the Mixer paper (arXiv 2105.01601): the grid is K times the
  file's, K an integer. It is cut into K x K tiles, each mixed as the file's grid was: matrices
  become K^2 copies on a diagonal of blocks, biases K^2 copies, and the hidden width of token
  mixing grows by K^2. (The paper cuts the sequence of tokens into K^2 equal parts. A tile's rows
  are not consecutive in it, so here tokens are reordered: tile by tile, each row by row.)
"interpolate_bilinear", "interpolate_bicubic": any grid. Tokens are resized to the file's grid,
  mixed, and the result is resized back. Both resizes are linear and are multiplied into the
  weights, W -> D^T W U^T and b -> U b. Shrinking is antialiased; equal grids change nothing.
"""

import collections
import logging
import math
import re
from typing import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from mixer_jax import models
from mixer_jax.errors import UserError
from mixer_jax.pretrained.containers import Arrays, listed

_LOG = logging.getLogger(__name__)

BLOCK_DIAGONAL = "block_diagonal"
_INTERPOLATIONS = {"interpolate_bilinear": "linear", "interpolate_bicubic": "cubic"}
RESIZES = (BLOCK_DIAGONAL, *_INTERPOLATIONS)

Shapes = Mapping[str, tuple[int, ...]]


def tokens_of(shapes: Shapes) -> int:
  """Number of tokens that the blocks mix; 0 if they mix any number."""
  mixed = lambda path, shape: len(shape) == 2 and models.token_axes(path)[1:] == ("out",)
  return next((shape[1] for path, shape in shapes.items() if mixed(path, shape)), 0)


def patch_of(shapes: Shapes) -> int:
  """Side of a patch in pixels, that of the stem's kernel; 0 without a stem of patches."""
  shape, overlaps = shapes.get("stem/kernel", ()), "stem_norm/scale" in shapes  # of a ConvNet
  return shape[0] if len(shape) == 4 and shape[0] == shape[1] and not overlaps else 0


def widened(source: str, shapes: Shapes, tokens: int) -> int:
  """Factor by which "block_diagonal" widens token mixing for this number of tokens.

  Raises a UserError for a grid that is no integer multiple of the file's.
  """
  old, new = _side(source, tokens_of(shapes)), _side("the model", tokens)
  if new % old:
    raise UserError(
      f"block_diagonal takes a {old}x{old} grid of patches to an integer multiple of it, not to"
      f" {new}x{new}; {', '.join(_INTERPOLATIONS)} take it to any"
    )
  return (new // old) ** 2


def check_patches(source: str, found: int, patch: int) -> None:
  """Raises a UserError if weights and model have patches of different sides; 0 is an unknown side."""
  if found and patch and found != patch:
    raise UserError(
      f"{source} has patches of {found}x{found} pixels, the model of {patch}x{patch};"
      f" set the model's patch_size to {found}"
    )


def check_tokens(source: str, found: int, tokens: int, resize: str) -> None:
  """Raises a UserError if weights mix another number of tokens than the model and are not resized.

  `found` is 0 for weights that mix any number.
  """
  if found not in (0, tokens) and not resize:
    old, new = _side(source, found), _side("the model", tokens)
    raise UserError(
      f"{source} mixes a {old}x{old} grid of patches, the model one of {new}x{new};"
      f" set resize_tokens to {' or '.join(RESIZES)}"
    )


def with_tokens(source: str, arrays: Arrays, shapes: Shapes, resize: str) -> Arrays:
  """Takes the weights over tokens to the model's number of them."""
  if resize not in ("", *RESIZES):
    raise UserError(f"resize_tokens is {resize!r}; allowed: '' (not at all), {', '.join(RESIZES)}")
  own = {path: array.shape for path, array in arrays.items()}
  if any(not path.startswith("head/") for path in shapes.keys() ^ own.keys()):
    return arrays  # they fail the comparison, which names all that differs at once
  check_patches(source, patch_of(own), patch_of(shapes))
  found, tokens = tokens_of(own), tokens_of(shapes)
  if found in (0, tokens):
    return arrays
  check_tokens(source, found, tokens, resize)
  old, new = _side(source, found), _side("the model", tokens)
  if resize == BLOCK_DIAGONAL:
    times = math.isqrt(widened(source, own, tokens))
    change = lambda array, axes: _block_diagonal(array, axes, old, times)
  else:
    method = _INTERPOLATIONS[resize]
    matrices = {"in": _resize_matrix(new, old, method).T, "out": _resize_matrix(old, new, method)}
    change = lambda array, axes: _interpolate(array, axes, matrices)
  _LOG.info("%s: token mixing taken from %dx%d to %dx%d (%s)", source, old, old, new, new, resize)
  axes = {path: models.token_axes(path) for path in arrays}
  return {path: change(x, axes[path]) if axes[path] else x for path, x in arrays.items()}


def _block_diagonal(array: np.ndarray, axes: tuple[str, ...], side: int, times: int) -> np.ndarray:
  """Copies for times x times tiles, each a grid of side x side tokens."""
  copies = np.eye(times**2, dtype=array.dtype) if array.ndim == 2 else np.ones(times**2)
  array = np.kron(copies, array).astype(array.dtype)
  # Axes over tokens go tile by tile now; `place` of each token of the big grid, row by row.
  row, column = np.divmod(np.arange((side * times) ** 2), side * times)
  tile = row // side * times + column // side
  place = tile * side**2 + row % side * side + column % side
  for i, axis in enumerate(axes):
    if axis != "hidden":
      array = np.take(array, place, axis=i)
  return array


def _resize_matrix(old: int, new: int, method: str) -> np.ndarray:
  """The matrix [new^2, old^2] that resizes a square grid, antialiased; rows sum to 1."""
  one_axis = np.asarray(jax.image.resize(jnp.eye(old), (new, old), method), np.float64)
  return np.kron(one_axis, one_axis)


def _interpolate(array: np.ndarray, axes: tuple[str, ...], matrices: Arrays) -> np.ndarray:
  for i, axis in enumerate(axes):
    if axis in matrices:
      array = np.moveaxis(np.tensordot(matrices[axis], array, (1, i)), 0, i)
  return array.astype(np.float32)


def _side(source: str, tokens: int) -> int:
  side = math.isqrt(tokens)
  if side**2 != tokens:
    why = f"{tokens} tokens are no square grid of patches"
    raise UserError(f"{source}: {why}; only such grids are resized")
  return side


def with_head(source: str, arrays: Arrays, shapes: Shapes, other_names: bool = False) -> Arrays:
  """Gives a fresh zero head where the classes differ or the file has no part of a head.

  A model without a head gets none.
  """
  if "head/kernel" not in shapes:
    rest = {path: array for path, array in arrays.items() if not path.startswith("head/")}
    if len(rest) < len(arrays):
      _LOG.info("%s: its head is dropped, for the model has none", source)
    return rest
  classes, own = shapes["head/kernel"][1], arrays.get("head/bias", np.zeros(0)).size
  if own == classes and not other_names:
    return arrays
  other = " other" if own == classes else ""
  _LOG.info("%s has a head for %d%s classes; fresh zero head for %d", source, own, other, classes)
  fresh = {path: np.zeros(shapes[path], np.float32) for path in ("head/kernel", "head/bias")}
  return arrays | fresh


def compare(
  source: str,
  arrays: Arrays,
  shapes: Shapes,
  name_in_file: Callable[[str], str] = lambda path: "",
) -> None:
  """Raises a UserError for any difference in names and shapes; one message names them all."""
  problems = {
    "missing are {}": [path for path in shapes if path not in arrays],
    "left over are {}": [path for path in arrays if path not in shapes],
  }
  for path, shape in shapes.items():
    if path in arrays and arrays[path].shape != shape:
      text = f"{{}} of shape {list(arrays[path].shape)} instead of {list(shape)}"
      problems.setdefault(text, []).append(path)
  if said := [text.format(_summary(p, name_in_file)) for text, p in problems.items() if p]:
    raise UserError(f"{source} does not fit the model: {'; '.join(said)}")


def _summary(paths: Iterable[str], name_in_file: Callable[[str], str]) -> str:
  """Lists paths; equal ones of several blocks become one, "MixerBlock_{0-11}/..."."""
  blocks = collections.defaultdict(list)
  for path in paths:
    match = re.match(r"(.*?Block_|blocks\.)(\d+)(.+)", path)
    head, number, tail = match.groups() if match else (path, "", "")
    blocks[head, tail].append(number)
  names = [f"{head}{_range(found)}{tail}" for (head, tail), found in blocks.items()]
  return listed([f"{n} ({theirs})" if (theirs := name_in_file(n)) else n for n in names])


def _range(numbers: list[str]) -> str:
  """["2", "0", "1"] as "{0-2}", with gaps as "{0,2}"; a single text as it is."""
  if len(numbers) == 1:
    return numbers[0]
  first, *_, last = found = sorted(map(int, numbers))
  whole = found == list(range(first, last + 1))
  return f"{{{first}-{last}}}" if whole else f"{{{','.join(map(str, found))}}}"
