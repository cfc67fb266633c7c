"""Pictures of the pages that rows of this folder are enough for.

A picture carries a checksum of what it shows, since the same picture has other bytes elsewhere.
"""

import hashlib
import io
import pathlib
from typing import Callable

import matplotlib
from matplotlib import pyplot
from PIL import Image, PngImagePlugin

from results.rows import Row, read, select
from results.tables import BUDGETS, CELLS, OPTIMIZERS

matplotlib.use("agg")
IMAGES = pathlib.Path(__file__).parent.parent / "docs" / "images"
_FIELD = "Checksum"
_COLORS = {name: f"C{i % 10}" for i, name in enumerate(OPTIMIZERS)}
_DASHED = OPTIMIZERS[10:]


def _points(rows: list[Row]) -> dict[tuple[str, str, str], tuple[float, float]]:
  """Means and deviations of test accuracies by cell, optimizer and budget."""
  found = {}
  for cell, where in CELLS.items():
    for optimizer in OPTIMIZERS:
      for budget, length in BUDGETS.items():
        own = select(rows, {**where, "optimizer": optimizer, "budget": length})
        numbers = {row["metric"]: float(row["value"]) for row in own}
        mean, deviation = (numbers[f"test top-1 {x} [%]"] for x in ("mean", "deviation"))
        found[cell, optimizer, budget] = mean, deviation
  return found


def _equal_time() -> list[Row]:
  return select(read("equal_time"), {"study": "frontier", "tuned at": "1x"})


def draw_budgets(points) -> pyplot.Figure:
  """Accuracies over budgets of time, a panel a cell."""
  figure, axes = pyplot.subplots(1, len(CELLS), figsize=(16, 4.2), layout="constrained")
  for axis, cell in zip(axes, CELLS):
    for optimizer, color in _COLORS.items():
      mean, deviation = zip(*(points[cell, optimizer, budget] for budget in BUDGETS))
      low, high = ([m + sign * d for m, d in zip(mean, deviation)] for sign in (-1, 1))
      dashes = "--" if optimizer in _DASHED else "-"
      axis.plot(list(BUDGETS), mean, dashes, marker=".", color=color, label=optimizer)
      axis.fill_between(list(BUDGETS), low, high, color=color, alpha=0.2, linewidth=0)
    axis.set(title=cell.replace("`", ""), xlabel="training time", ylabel="test top-1 (%)")
    axis.grid(alpha=0.3)
  figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
  figure.suptitle("means of three seeds, shaded by a standard deviation", fontsize=10)
  return figure


# To a file its drawing and what it draws.
PICTURES: dict[str, tuple[Callable, Callable]] = {
  "frontier_budgets.png": (draw_budgets, lambda: _points(_equal_time())),
}


def outdated() -> list[str]:
  """The pictures that are missing or show other numbers than the rows have."""
  return [name for name, (_, data) in PICTURES.items() if _shown(name) != _checksum(data())]


def draw(names: list[str]) -> None:
  """Draws pictures anew, in 128 colours."""
  for name in names:
    function, data = PICTURES[name]
    points, drawn, info = data(), io.BytesIO(), PngImagePlugin.PngInfo()
    function(points).savefig(drawn, dpi=100)
    pyplot.close("all")
    info.add_text(_FIELD, _checksum(points))
    few = Image.open(drawn).convert("RGB").quantize(128)
    few.save(IMAGES / name, optimize=True, pnginfo=info)


def _shown(name: str) -> str | None:
  path = IMAGES / name
  return Image.open(path).info.get(_FIELD) if path.exists() else None


def _checksum(data: object) -> str:
  return hashlib.sha256(repr(data).encode()).hexdigest()
