"""Figures leave the caller's matplotlib alone, as a notebook needs it."""

import matplotlib
import numpy as np

from mixer_jax.report import figures


def test_neither_backend_nor_pyplot_know_of_them(tmp_path):
  matplotlib.use("svg")
  from matplotlib import pyplot

  before = pyplot.get_fignums()
  figure, axes = figures.panels(2, 3, (6, 4))
  axes[1, 2].plot(np.arange(3))
  assert axes.shape == (2, 3)
  path = figures.save(figure, tmp_path / "figure.png")
  assert path.read_bytes().startswith(b"\x89PNG")
  assert matplotlib.get_backend() == "svg" and pyplot.get_fignums() == before


def test_errors_that_fall_far_have_a_logarithmic_axis():
  def scale(*lines):
    _, ((axis,),) = figures.panels(1, 1, (2, 2))
    for y in lines:
      axis.plot(y)
    figures.fit_scale(axis)
    return axis.get_yscale()

  assert scale([1.0, 0.01], [0.5, 0.3]) == "log"
  assert scale([1.0, 0.5]) == scale([1.0, 0.0]) == scale([1.0, -0.01]) == scale() == "linear"
  assert scale([1.0, 0.01, float("nan")]) == "log"


def test_a_title_stays_within_its_figure(tmp_path):
  figure, _ = figures.panels(1, 1, (5, 3))
  figures.head(
    figure, "mean of the seeds, shaded from the lowest to the highest; dotted: as published"
  )
  figures.save(figure, tmp_path / "a.png")
  box = figure._suptitle.get_window_extent()
  assert box.x0 >= 0 and box.x1 <= figure.bbox.x1
