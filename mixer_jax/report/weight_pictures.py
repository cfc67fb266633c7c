"""Pictures of learned weights: token mixing as images, and the sparsity of layers.

After Touvron et al., "ResMLP" (TPAMI 2022), Figures 2 and 3, for any model of
the zoo. A token-mixing kernel [tokens, units] gives one image of the patch grid
per unit: the weights with which the unit reads the patches.
"""

import json
import pathlib
import re
from typing import Any

from flax import traverse_util
import numpy as np

from mixer_jax import models
from mixer_jax.errors import UserError
from mixer_jax.report import figures

_UNITS = 12  # shown per layer
_SMALL = 0.05  # of the largest weight of a layer


def kernels(params: Any) -> dict[str, np.ndarray]:
  """All dense kernels [inputs, outputs] by path, in the order of the layers."""
  named = traverse_util.flatten_dict(models.unrolled(params), sep="/")
  paths = (path for path in models.by_numbers(named) if path.endswith("/kernel"))
  return {path: np.asarray(named[path]).reshape(-1, named[path].shape[-1]) for path in paths}


def sparsity(kernel: np.ndarray) -> float:
  """Share of weights whose absolute value is below a twentieth of the largest."""
  magnitude = np.abs(kernel)
  largest = magnitude.max()
  return float(np.mean(magnitude < _SMALL * largest)) if largest > 0 else 1.0


def draw(params: Any, grid: tuple[int, int], directory: pathlib.Path) -> list[pathlib.Path]:
  """Writes token_mixing.png, sparsity.png and weights.json into a directory; returns their paths.

  `grid` is (rows, columns) of an image's patches; a UserError if no matrix mixes so many tokens.
  """
  drawn = {"token_mixing": mixing_figure(params, grid), "sparsity": sparsity_figure(params)}
  paths = [figures.save(figure, directory / f"{name}.png") for name, figure in drawn.items()]
  shares = {name: sparsity(kernel) for name, kernel in kernels(params).items()}
  numbers = directory / "weights.json"
  numbers.write_text(json.dumps({"grid": grid, "sparsity": shares}, indent=1) + "\n")
  return [*paths, numbers]


def mixing_figure(params: Any, grid: tuple[int, int]) -> Any:
  """Draws numbered units, spread evenly over each layer, a row a layer; blue is negative.

  Raises a UserError as `draw` does.
  """
  named, tokens = kernels(params), grid[0] * grid[1]
  mixing = {k: v for k, v in named.items() if models.reads_tokens(k) and len(v) == tokens}
  if not any(map(models.reads_tokens, named)):
    raise UserError("the model has no matrix over tokens, hence no pictures of their weights")
  if not mixing:
    raise UserError(
      f"the model has no token-mixing matrix for {grid[0]}x{grid[1]} patches; it has"
      f" {', '.join(f'{k} {v.shape}' for k, v in list(named.items())[:3])}, ..."
    )
  columns = min(_UNITS, min(v.shape[1] for v in mixing.values()))
  figure, axes = figures.panels(len(mixing), columns, (columns * 0.9, len(mixing) * 1.05))
  for row, (name, kernel) in zip(axes, mixing.items()):
    units = np.linspace(0, kernel.shape[1] - 1, columns).round().astype(int)
    for axis, unit in zip(row, units):
      image = kernel[:, unit].reshape(grid)
      limit = np.abs(image).max() or 1.0
      axis.imshow(image, cmap="RdBu_r", vmin=-limit, vmax=limit)
      axis.set(xticks=[], yticks=[])
      axis.set_title(unit, fontsize=7, pad=2)
    row[0].set_ylabel(name.split("/")[0].rpartition("_")[2], rotation=0, labelpad=10)
  figure.supylabel("block")
  figure.suptitle("weights with which units of token mixing read the patches", fontsize=10)
  return figure


def sparsity_figure(params: Any) -> Any:
  """Share of small weights over the depth, a line per kind of layer."""
  figure, [[axis]] = figures.panels(1, 1, (7, 4))
  kinds: dict[str, list[tuple[int, float]]] = {}
  for name, kernel in kernels(params).items():
    if found := re.match(r"[A-Za-z]+_(\d+)/(.*)/kernel$", name):
      kinds.setdefault(found[2], []).append((int(found[1]), sparsity(kernel)))
  for kind, points in kinds.items():
    axis.plot(*zip(*points), marker="o", label=kind)
  axis.set(xlabel="block", ylabel=f"weights below {_SMALL:.0%} of the layer's largest", ylim=(0, 1))
  axis.xaxis.get_major_locator().set_params(integer=True)
  axis.grid(alpha=0.3)
  axis.legend(fontsize=8)
  return figure
