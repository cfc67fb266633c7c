"""Pictures of masks over images, and of which classes are taken for which."""

import colorsys
from typing import Any, Mapping, Sequence

import numpy as np

from mixer_jax.tasks import panels
from mixer_jax.tasks.metrics import ious

_SHOWN = 6  # images


def colours(classes: int) -> np.ndarray:
  """Colours uint8 [classes, 3] that differ: hues at the golden section, in three shades."""
  shades = [(i * 0.618034 % 1, 0.85 - 0.25 * (i % 2), 0.95 - 0.2 * (i % 3)) for i in range(classes)]
  return np.array([[round(255 * x) for x in colorsys.hsv_to_rgb(*hsv)] for hsv in shades], np.uint8)


def over(image: np.ndarray, mask: np.ndarray, counted: np.ndarray, classes: int) -> np.ndarray:
  """An image [h, w, 3] under the colours of its classes [h, w], black where `counted` is 0."""
  shown = 0.4 * image + 0.6 * colours(classes)[mask]
  return np.where(counted[..., None] != 0, shown, 0).astype(np.uint8)


def draw_masks(
  images: np.ndarray,
  labels: np.ndarray,
  found: np.ndarray,
  counted: np.ndarray,
  names: Sequence[str],
) -> Any:
  """A Matplotlib figure of images [n, h, w, 3] with their true and found masks, [n, h, w]."""
  n, classes, (height, width) = min(_SHOWN, len(images)), len(names), images.shape[1:3]
  everywhere = np.ones((height, width))
  rows = [
    (image, over(image, label, weight, classes), over(image, answer, everywhere, classes))
    for image, label, answer, weight in zip(images[:n], labels, found, counted)
  ]
  figure, axes = panels.of_images(rows, (9, 0.4 + 3 * n * height / width))
  for axis, title in zip(axes[0], ("image", "truth (black: void)", "prediction")):
    axis.set_title(title, size=9)
  _add_legend(figure, names)
  return figure


def draw_confusion(counts: np.ndarray, names: Sequence[str]) -> Any:
  """A figure of how often each class (row) was taken for each (column), and of each class's IoU."""
  each = np.asarray(ious(counts))
  rows = [f"{name} {'-' if np.isnan(x) else f'{x:.1%}'}" for name, x in zip(names, each)]
  shown = lambda share, count: f"{share:.0%}" if share >= 0.005 else ""
  figure = panels.confusion(counts, names, shown, rows)
  figure.axes[0].set(ylabel="true class, with its intersection over union")
  figure.axes[0].set_title(f"mean IoU {np.nanmean(each):.1%}", size=9)
  return figure


def draw_augmented(batches: Sequence[Mapping[str, np.ndarray]], names: Sequence[str]) -> Any:
  """A Matplotlib figure of several draws of training examples, an example a row, under their masks.

  Each batch has "image" [n, h, w, 3] in about [0, 1], "label" and "weight" [n, h, w].
  """
  shown = lambda batch, i: over(
    np.clip(255 * batch["image"][i], 0, 255), batch["label"][i], batch["weight"][i], len(names)
  )
  n, draws = len(batches[0]["image"]), len(batches)
  rows = [[shown(batch, i) for batch in batches] for i in range(n)]
  heading = "training examples as the steps see them; black does not count"
  figure, _ = panels.of_images(rows, (draws * 1.3, n * 1.3 + 0.5), heading)
  _add_legend(figure, names)
  return figure


def _add_legend(figure: Any, names: Sequence[str]) -> None:
  from matplotlib.patches import Patch

  if len(names) <= panels.NAMED:
    pairs = zip(colours(len(names)) / 255, names)
    patches = [Patch(color=colour, label=panels.plain(name)) for colour, name in pairs]
    figure.legend(handles=patches, loc="outside lower center", ncols=6, fontsize=7)
