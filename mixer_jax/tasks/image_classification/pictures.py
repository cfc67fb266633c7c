"""Figures of a classifier's mistakes; `panels.confusion` draws the table of all."""

from typing import Any, Sequence

import numpy as np

from mixer_jax.tasks.panels import panels, plain

_WORST = 12  # mistakes that are shown


def confusion(labels: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
  """Counts how often each class (row) was taken for each other (column): int [classes, classes]."""
  counts = np.zeros((probabilities.shape[1],) * 2, int)
  np.add.at(counts, (labels, probabilities.argmax(1)), 1)
  return counts


def worst(labels: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
  """The rows of the examples that are wrong with the highest probability, the worst first."""
  wrong = np.flatnonzero(probabilities.argmax(1) != labels)
  return wrong[np.argsort(-probabilities[wrong].max(1), kind="stable")][:_WORST]


def draw_mistakes(
  images: np.ndarray, labels: np.ndarray, probabilities: np.ndarray, names: Sequence[str]
) -> Any:
  """A Matplotlib figure of images [n, h, w, 3] taken for another class, with both classes."""
  names = [plain(name) for name in names]
  figure, axes = panels(3, 4, (9, 7.5))
  for axis, image, label, row in zip(axes.flat, images, labels, probabilities, strict=False):
    axis.imshow(image)
    axis.set_title(f"{names[label]}\n{names[row.argmax()]} {row.max():.0%}", size=9)
  for axis in axes.flat:
    axis.axis("off")
  figure.suptitle("most confident mistakes: true class above, predicted class below")
  return figure


def draw_augmented(
  images: np.ndarray, augmented: np.ndarray, labels: np.ndarray, names: Sequence[str]
) -> Any:
  """A Matplotlib figure of images [n, h, w, 3] uint8 beside augmented ones.

  `augmented` [n, draws, h, w, 3] have values of about [0, 1]; noise beyond them is cut off.
  """
  n, draws = augmented.shape[:2]
  names = [plain(name) for name in names]
  figure, axes = panels(n, draws + 1, (draws + 1, n + 0.3))
  for row, image, others, label in zip(axes, images, augmented, labels):
    for axis, shown in zip(row, [image, *np.clip(others, 0, 1)]):
      axis.imshow(shown)
      axis.axis("off")
    row[0].set_title(names[label], size=8)
  figure.suptitle("stored images on the left; beside each, as the training steps see it")
  return figure
