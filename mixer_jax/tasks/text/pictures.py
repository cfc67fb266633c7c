"""Pictures of the matrices over tokens, as in "Pay Attention to MLPs" (Liu et al., 2021, Figure 3).

A matrix over tokens that is constant along its diagonals shifts a window over the text, as a
convolution does: `toeplitz_share` says how close a learned one has come.
"""

import functools
import math
import re
from typing import Any, Mapping, Sequence

from flax import traverse_util
import flax.linen as nn
import jax
import numpy as np
import scipy.linalg

from mixer_jax import models
from mixer_jax.tasks.panels import panels, plain

_COLUMNS = 6
_ATTENDED = 40  # tokens of a sentence that are shown


def matrices(params: Any) -> dict[str, np.ndarray]:
  """W [tokens, tokens] of each block by its name, of y_i = sum_j W_ij x_j over tokens.

  Of a token-mixing MLP it is the product of both matrices, as if nothing were in between.
  """
  blocks: dict[str, list[np.ndarray]] = {}
  flat = traverse_util.flatten_dict(models.unrolled(jax.device_get(params)), sep="/")
  for path in models.by_numbers(flat):
    if path.endswith("/diagonals"):
      diagonals, n = flat[path], (len(flat[path]) + 1) // 2
      blocks.setdefault(_block(path), []).append(
        scipy.linalg.toeplitz(diagonals[n - 1 :: -1], diagonals[n - 1 :])
      )
    elif models.token_axes(path) and path.endswith("/kernel"):
      blocks.setdefault(_block(path), []).append(flat[path])
  return {name: functools.reduce(np.matmul, kernels).T for name, kernels in blocks.items()}


_block = lambda path: re.search(r"[A-Za-z]+Block_\d+", path)[0]


def toeplitz_share(matrix: np.ndarray) -> float:
  """Share of the squared norm that the nearest Toeplitz matrix has; 1 if it is one."""
  n = len(matrix)
  means = np.array([np.diagonal(matrix, k).mean() for k in range(1 - n, n)])
  counts = n - np.abs(np.arange(1 - n, n))
  return float(np.sum(counts * means**2) / max(np.sum(np.square(matrix)), 1e-30))


def of_encoder(
  model: nn.Module, variables: Any, inputs: tuple[Any, ...], tokens: Sequence[str]
) -> Mapping[str, Any]:
  """Figures by name: the matrices, their middle rows, and where attention looks in a sentence.

  `inputs` are those of the model for that sentence alone, a batch of one; `tokens` its words.
  """
  found, drawn = matrices(variables["params"]), {}
  if found:
    drawn["spatial"] = images(found)
    drawn["filters"] = _middle_rows(found)
  _, collections = model.apply(variables, *inputs, mutable=["intermediates"])
  sown = traverse_util.flatten_dict(dict(collections.get("intermediates", {})), sep="/")
  maps = {k: np.asarray(v[0])[..., 0, :, :] for k, v in sown.items() if k.endswith("/attention")}
  if maps:
    drawn["attention"] = attention(_apart(maps), tokens, tokens)
  return drawn


def _apart(maps: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Maps [tokens, tokens] by block, also of scanned blocks, [blocks, tokens, tokens]."""
  found = {}
  for path, array in maps.items():
    if array.ndim == 2:
      found[_block(path)] = array
    else:
      name = re.search(r"[A-Za-z]+Block", path)[0]
      found |= {f"{name}_{i}": x for i, x in enumerate(array)}
  return dict(sorted(found.items(), key=lambda item: int(item[0].rpartition("_")[2])))


def _square_panels(number: int, size: float) -> tuple[Any, list[Any]]:
  """A figure with `number` axes, `_COLUMNS` a row, of `size` inches."""
  columns = min(number, _COLUMNS)
  rows = math.ceil(number / columns)
  figure, axes = panels(rows, columns, (columns * size, rows * size))
  axes = axes.ravel().tolist()
  for axis in axes[number:]:
    axis.remove()
  return figure, axes[:number]


def images(found: Mapping[str, np.ndarray]) -> Any:
  """A figure of `matrices`, by block."""
  figure, axes = _square_panels(len(found), 1.9)
  for axis, (name, matrix) in zip(axes, found.items()):
    limit = np.abs(matrix).max() or 1.0
    axis.imshow(matrix, cmap="RdBu_r", vmin=-limit, vmax=limit)
    axis.set(xticks=[], yticks=[])
    axis.set_title(f"{name.rpartition('_')[2]}: {toeplitz_share(matrix):.0%} Toeplitz", fontsize=8)
  figure.suptitle("matrices over tokens, by block; blue is negative", fontsize=10)
  return figure


def _middle_rows(found: Mapping[str, np.ndarray]) -> Any:
  figure, axes = _square_panels(len(found), 1.9)
  for axis, (name, matrix) in zip(axes, found.items()):
    middle = len(matrix) // 2
    axis.plot(np.arange(len(matrix)) - middle, matrix[middle], linewidth=0.8)
    axis.tick_params(labelsize=6)
    axis.set_title(name.rpartition("_")[2], fontsize=8)
  figure.supxlabel("offset in tokens", fontsize=8)
  figure.suptitle("weights with which the middle token reads the others, by block", fontsize=10)
  return figure


def attention(
  maps: Mapping[str, np.ndarray], tokens: Sequence[str], attended: Sequence[str]
) -> Any:
  """A figure of weights [tokens, attended tokens] by block, of the first tokens of both."""
  tokens, attended = tokens[:_ATTENDED], attended[:_ATTENDED]
  n, m = len(tokens), len(attended)
  figure, axes = _square_panels(len(maps), 0.8 + 0.11 * max(n, m))
  for axis, (name, weights) in zip(axes, maps.items()):
    axis.imshow(weights[:n, :m], cmap="Blues", vmin=0)
    axis.set_xticks(range(m), [*map(plain, attended)], rotation=90, fontsize=5)
    axis.set_yticks(range(n), [*map(plain, tokens)], fontsize=5)
    axis.set_title(name.rpartition("_")[2], fontsize=8)
  figure.suptitle("tokens (columns) that each token (row) attends to, by block", fontsize=10)
  return figure
