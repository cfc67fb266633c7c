"""Masks over images, and which classes are taken for which."""

import colorsys
from typing import Any, Mapping, Sequence

import numpy as np

from mixer_jax.tasks.metrics import ious
from mixer_jax.tasks.panels import NAMED, confusion, panels, plain

_SHOWN = 6  # images


def colours(classes: int) -> np.ndarray:
  """Colours that are told apart, uint8 [classes, 3]: hues at the golden section, three shades."""
  shades = [(i * 0.618034 % 1, 0.85 - 0.25 * (i % 2), 0.95 - 0.2 * (i % 3)) for i in range(classes)]
  return np.array([[round(255 * x) for x in colorsys.hsv_to_rgb(*hsv)] for hsv in shades], np.uint8)


def over(image: np.ndarray, mask: np.ndarray, counted: np.ndarray, classes: int) -> np.ndarray:
  """An image [h, w, 3] under the colours of its classes [h, w], black where it does not count."""
  shown = 0.4 * image + 0.6 * colours(classes)[mask]
  return np.where(counted[..., None] != 0, shown, 0).astype(np.uint8)


def draw_masks(
  images: np.ndarray,
  labels: np.ndarray,
  found: np.ndarray,
  counted: np.ndarray,
  names: Sequence[str],
) -> Any:
  """A Matplotlib figure of images [n, h, w, 3], their true masks and the answers, [n, h, w]."""
  n, classes = min(_SHOWN, len(images)), len(names)
  height, width = images.shape[1:3]
  figure, axes = panels(n, 3, (9, 0.4 + 3 * n * height / width))
  everywhere = np.ones((height, width))
  for row, image, label, answer, weight in zip(axes, images, labels, found, counted):
    true, answer = over(image, label, weight, classes), over(image, answer, everywhere, classes)
    for axis, shown in zip(row, (image, true, answer)):
      axis.imshow(shown)
      axis.axis("off")
  for axis, title in zip(axes[0], ("image", "truth (black: void)", "prediction")):
    axis.set_title(title, size=9)
  _add_legend(figure, names)
  return figure


def draw_confusion(counts: np.ndarray, names: Sequence[str]) -> Any:
  """How often each class (row) was taken for each (column), and the classes' IoU, as a figure."""
  each = np.asarray(ious(counts))
  rows = [f"{name} {'-' if np.isnan(x) else f'{x:.1%}'}" for name, x in zip(names, each)]
  shown = lambda share, count: f"{share:.0%}" if share >= 0.005 else ""
  figure = confusion(counts, names, shown, rows)
  [axis, *_] = figure.axes
  axis.set(ylabel="true class, with its intersection over union")
  axis.set_title(f"mean IoU {np.nanmean(each):.1%}", size=9)
  return figure


def draw_augmented(batches: Sequence[Mapping[str, np.ndarray]], names: Sequence[str]) -> Any:
  """A Matplotlib figure of draws of training examples, an example a row, masks over the images.

  Each batch has "image" [n, h, w, 3] in about [0, 1], "label" and "weight" [n, h, w].
  """
  n, draws = len(batches[0]["image"]), len(batches)
  figure, axes = panels(n, draws, (draws * 1.3, n * 1.3 + 0.5))
  for column, batch in zip(axes.T, batches):
    for row, axis in enumerate(column):
      image = np.clip(batch["image"][row] * 255, 0, 255)
      axis.imshow(over(image, batch["label"][row], batch["weight"][row], len(names)))
      axis.axis("off")
  figure.suptitle("training examples as the steps see them; black does not count", size=9)
  _add_legend(figure, names)
  return figure


def _add_legend(figure: Any, names: Sequence[str]) -> None:
  from matplotlib.patches import Patch

  if len(names) <= NAMED:
    patches = [
      Patch(color=c / 255, label=plain(name)) for c, name in zip(colours(len(names)), names)
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=6, fontsize=7)
