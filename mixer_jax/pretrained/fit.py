"""Weights of one task for another: classes, resolution, patch grid.

Tokens are the patches of a grid, row by row. Where the grids of a model and
a file differ, the weights over tokens change in one of these ways:

"block_diagonal", as in Appendix C of the Mixer paper (arXiv 2105.01601): the grid is K times the
  file's, K an integer (on each axis its own). It is cut into K x K tiles, each mixed as the file's
  grid was: matrices become K^2 copies on a diagonal of blocks, biases K^2 copies, and the hidden
  width of token mixing grows by K^2. (The paper cuts the sequence of tokens into K^2 equal parts. A
  tile's rows are not consecutive in it, so here tokens are reordered: tile by tile, each row by row.)
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
from mixer_jax.options import Size, as_size, pair
from mixer_jax.pretrained.containers import Arrays, listed

_LOG = logging.getLogger(__name__)

BLOCK_DIAGONAL = "block_diagonal"
_INTERPOLATIONS = {"interpolate_bilinear": "linear", "interpolate_bicubic": "cubic"}
RESIZES = (BLOCK_DIAGONAL, *_INTERPOLATIONS)
"""Values of `resize_tokens`: what becomes of weights over tokens for another number of patches."""

Shapes = Mapping[str, tuple[int, ...]]
Grid = tuple[int, ...]  # rows and columns; () if it is not known


def tokens_of(shapes: Shapes) -> int:
  """Number of tokens that the blocks mix; 0 if they mix any number."""
  mixed = lambda path, shape: len(shape) == 2 and models.token_axes(path)[1:] == ("out",)
  return next((shape[1] for path, shape in shapes.items() if mixed(path, shape)), 0)


def patch_of(shapes: Shapes) -> Size:
  """The size of a patch in pixels, that of the stem's kernel; 0 without a stem of patches."""
  shape, overlaps = shapes.get("stem/kernel", ()), "stem_norm/scale" in shapes  # of a ConvNet
  return as_size(shape[:2]) if len(shape) == 4 and not overlaps else 0


def grid_of(tokens: int, image_size: Size = 0, patch: Size = 0) -> Grid:
  """Rows and columns of patches: of images of a size, or else a square; () if it is neither."""
  if image_size and patch:
    rows, columns = (n // side for n, side in zip(pair(image_size), pair(patch)))
    return (rows, columns) if rows * columns == tokens else ()
  side = math.isqrt(tokens)
  return (side, side) if side**2 == tokens else ()


def times(old: Grid, new: Grid) -> Grid:
  """How many tiles "block_diagonal" has on each axis; a UserError for a grid of another kind."""
  if any(n % own for n, own in zip(new, old)):
    raise UserError(
      f"block_diagonal takes a {shown(old)} grid of patches to an integer multiple of it, not to"
      f" {shown(new)}; {', '.join(_INTERPOLATIONS)} take it to any"
    )
  return tuple(n // own for n, own in zip(new, old))


def shown(size: Grid) -> str:
  """A size for a message, "14x14"."""
  return "x".join(map(str, size))


def check_patches(source: str, found: Size, patch: Size) -> None:
  """Raises a UserError if weights and model have patches of other sizes; 0 is an unknown one."""
  if found and patch and pair(found) != pair(patch):
    raise UserError(
      f"{source} has patches of {shown(pair(found))} pixels, the model of {shown(pair(patch))};"
      f" set the model's patch_size to {found}"
    )


def check_grid(source: str, old: Grid, new: Grid, resize: str) -> None:
  """Raises a UserError if weights mix another grid than the model's and are not resized."""
  if old != new and not resize:
    raise UserError(
      f"{source} mixes a {shown(old)} grid of patches, the model one of {shown(new)};"
      f" take images of the size that has that grid, or set resize_tokens to {' or '.join(RESIZES)}"
    )


def with_tokens(
  source: str, arrays: Arrays, shapes: Shapes, resize: str, old: Grid = (), new: Grid = ()
) -> Arrays:
  """Takes the weights over tokens to the model's grid; of () only the number of tokens is known."""
  if resize not in ("", *RESIZES):
    raise UserError(f"resize_tokens is {resize!r}; allowed: '' (not at all), {', '.join(RESIZES)}")
  own = {path: array.shape for path, array in arrays.items()}
  if any(not path.startswith("head/") for path in shapes.keys() ^ own.keys()):
    return arrays  # they fail the comparison, which names all that differs at once
  check_patches(source, patch_of(own), patch_of(shapes))
  found, tokens = tokens_of(own), tokens_of(shapes)
  if not found or (found == tokens and (old == new or not (old and new))):
    return arrays
  old, new = old or square(source, found), new or square("the model", tokens)
  check_grid(source, old, new, resize)
  if resize == BLOCK_DIAGONAL:
    tiles = times(old, new)
    change = lambda array, axes: _block_diagonal(array, axes, old, tiles)
  else:
    method = _INTERPOLATIONS[resize]
    matrices = {"in": _resize_matrix(new, old, method).T, "out": _resize_matrix(old, new, method)}
    change = lambda array, axes: _interpolate(array, axes, matrices)
  _LOG.info("%s: token mixing taken from %s to %s (%s)", source, shown(old), shown(new), resize)
  axes = {path: models.token_axes(path) for path in arrays}
  return {path: change(x, axes[path]) if axes[path] else x for path, x in arrays.items()}


def _block_diagonal(array: np.ndarray, axes: tuple[str, ...], old: Grid, tiles: Grid) -> np.ndarray:
  """Copies for tiles, each a grid of the `old` rows and columns of tokens."""
  (rows, columns), number = old, math.prod(tiles)
  copies = np.eye(number, dtype=array.dtype) if array.ndim == 2 else np.ones(number)
  array = np.kron(copies, array).astype(array.dtype)
  # Axes over tokens go tile by tile now; `place` of each token of the big grid, row by row.
  row, column = np.divmod(np.arange(rows * columns * number), columns * tiles[1])
  tile = row // rows * tiles[1] + column // columns
  place = tile * rows * columns + row % rows * columns + column % columns
  for i, axis in enumerate(axes):
    if axis != "hidden":
      array = np.take(array, place, axis=i)
  return array


def _resize_matrix(old: Grid, new: Grid, method: str) -> np.ndarray:
  """The matrix [new tokens, old tokens] that resizes a grid, antialiased; rows sum to 1."""
  one_axis = lambda n, m: np.asarray(jax.image.resize(jnp.eye(n), (m, n), method), np.float64)
  return np.kron(*map(one_axis, old, new))


def _interpolate(array: np.ndarray, axes: tuple[str, ...], matrices: Arrays) -> np.ndarray:
  for i, axis in enumerate(axes):
    if axis in matrices:
      array = np.moveaxis(np.tensordot(matrices[axis], array, (1, i)), 0, i)
  return array.astype(np.float32)


def square(source: str, tokens: int) -> Grid:
  """The square grid of so many tokens; a UserError if there is none."""
  if not (grid := grid_of(tokens)):
    why = f"{tokens} tokens are no square grid of patches"
    raise UserError(f"{source}: {why}; only such grids, or those of a run, are resized")
  return grid


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
