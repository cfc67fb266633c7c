"""Scales, titles and files of figures, whose panels are those of the tasks' pictures."""

import pathlib
import textwrap
from typing import Any, Sequence

import numpy as np

from mixer_jax.errors import as_user_error
from mixer_jax.tasks.panels import panels as panels

_WIDE, _MANY = 30, 30


def marker(points: Sequence) -> str:
  """The mark at each point of a line, which alone shows a single one; "" of many points."""
  return "." if len(points) < _MANY else ""


def fit_scale(axis: Any) -> None:
  """Makes the y axis of errors or losses logarithmic if its lines fall by more than a factor 30."""
  drawn = np.concatenate([np.ravel(line.get_ydata()) for line in axis.lines] or [np.zeros(0)])
  values = drawn[np.isfinite(drawn)]
  if len(values) and values.min() > 0 and values.max() > _WIDE * values.min():
    axis.set_yscale("log")


def save(figure: Any, path: pathlib.Path) -> pathlib.Path:
  """Writes a figure as PNG and returns its path, or raises a UserError."""
  with as_user_error(f"{path}: cannot be written", OSError):
    figure.savefig(path, dpi=110)
  return path


def head(figure: Any, text: str) -> None:
  """A title over all panels, in as many lines as the width of the figure takes."""
  figure.suptitle(textwrap.fill(text, int(12 * figure.get_figwidth())), fontsize=10)
