"""Figures of a classifier's mistakes."""

from typing import Any, Sequence

import numpy as np

_WORST = 12  # mistakes that are shown


def confusion(labels: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
  """How often each class (row) was taken for each (column): int [classes, classes]."""
  counts = np.zeros((probabilities.shape[1],) * 2, int)
  np.add.at(counts, (labels, probabilities.argmax(1)), 1)
  return counts


def worst(labels: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
  """Which examples are wrong with the highest probability, the worst first."""
  wrong = np.flatnonzero(probabilities.argmax(1) != labels)
  return wrong[np.argsort(-probabilities[wrong].max(1), kind="stable")][:_WORST]


def draw_confusion(counts: np.ndarray, names: Sequence[str]) -> Any:
  """The table of `confusion` as a Matplotlib figure; names and numbers up to 20 classes."""
  from matplotlib.figure import Figure  # late: most commands draw nothing

  figure = Figure(figsize=(7, 6.4), layout="constrained")
  axis = figure.subplots()
  shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
  image = axis.imshow(shares, cmap="Blues", vmin=0, vmax=1)
  figure.colorbar(image, label="share of the true class")
  axis.set(xlabel="predicted class", ylabel="true class")
  if len(names) <= 20:
    axis.set_xticks(range(len(names)), names, rotation=60, ha="right")
    axis.set_yticks(range(len(names)), names)
    for (row, column), count in np.ndenumerate(counts):
      colour = "white" if shares[row, column] > 0.5 else "black"
      axis.text(column, row, count, ha="center", va="center", size=8, color=colour)
  return figure


def draw_mistakes(
  images: np.ndarray, labels: np.ndarray, probabilities: np.ndarray, names: Sequence[str]
) -> Any:
  """A Matplotlib figure of images [n, h, w, 3] taken for another class, with both classes."""
  from matplotlib.figure import Figure

  figure = Figure(figsize=(9, 7.5), layout="constrained")
  for axis, image, label, row in zip(
    figure.subplots(3, 4).flat, images, labels, probabilities, strict=False
  ):
    axis.imshow(image)
    axis.set_title(f"{names[label]}\n{names[row.argmax()]} {row.max():.0%}", size=9)
  for axis in figure.axes:
    axis.axis("off")
  figure.suptitle("most confident mistakes: true class above, predicted class below")
  return figure


def draw_augmented(
  images: np.ndarray, augmented: np.ndarray, labels: np.ndarray, names: Sequence[str]
) -> Any:
  """A Matplotlib figure of images [n, h, w, 3] uint8 beside augmented ones.

  `augmented` [n, draws, h, w, 3] have values of about [0, 1]; noise beyond them is cut off.
  """
  from matplotlib.figure import Figure

  n, draws = augmented.shape[:2]
  figure = Figure(figsize=(draws + 1, n + 0.3), layout="constrained")
  for row, (image, others, label) in enumerate(zip(images, augmented, labels)):
    for column, shown in enumerate([image, *np.clip(others, 0, 1)]):
      axis = figure.add_subplot(n, draws + 1, row * (draws + 1) + column + 1)
      axis.imshow(shown)
      axis.axis("off")
      if not column:
        axis.set_title(names[label], size=8)
  figure.suptitle("stored images on the left; beside each, as the training steps see it")
  return figure
