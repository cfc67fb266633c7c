"""Figures leave the caller's matplotlib alone, as a notebook needs it."""

import matplotlib
import numpy as np

from mixer_jax.report import figures
from mixer_jax.tasks import panels
from mixer_jax.tasks.image_classification import pictures as image_pictures
from mixer_jax.tasks.segmentation import pictures as mask_pictures
from mixer_jax.tasks.text import pictures as text_pictures


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


def test_names_with_dollars_are_no_mathematics(tmp_path):
  names, image = ["under $10_$", "$$"], np.zeros((2, 4, 4, 3), np.uint8)
  drawn = [
    panels.confusion(np.eye(2), names),
    image_pictures.draw_mistakes(image, np.arange(2), np.eye(2)[::-1], names),
    mask_pictures.draw_confusion(np.eye(2), names),
    text_pictures.attention({"Block_0": np.eye(2)}, names, names),
  ]
  for figure in drawn:
    figures.save(figure, tmp_path / "a.png")
  assert drawn[0].axes[0].get_xticklabels()[0].get_text() == r"under \$10_\$"
