"""Figures leave the caller's matplotlib alone, as a notebook needs it; scales, legends, titles."""

import matplotlib
import numpy as np
import pytest

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
  path = figures.save(figure, tmp_path / "new" / "figure.png")
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
    figure, "mean of the seeds, shaded from the lowest to the highest; dotted: published"
  )
  figures.save(figure, tmp_path / "a.png")
  box = figure._suptitle.get_window_extent()
  assert box.x0 >= 0 and box.x1 <= figure.bbox.x1


def test_each_of_many_lines_has_a_style_and_a_name_beneath_the_panels():
  names = [f"optimizer {i}" for i in range(24)]
  styles = figures.styles(names)
  assert len({tuple(style.values()) for style in styles.values()}) == 24
  for number in (3, 24):
    figure, axes = figures.panels(1, 2, (8, 4))
    for i, name in enumerate(names[:number]):
      axes[0, i % 2].plot([0, 1], [i, i + 1], label=name, **styles[name])
    figures.legend(figure, axes)
    beneath = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    inside = [axis.get_legend() for axis in axes[0]]
    assert sorted(beneath) == sorted(names if number == 24 else [])
    assert (None in inside) == (number == 24)


@pytest.mark.parametrize("number, letters", [(30, 3), (30, 300), (2, 60)])
def test_a_legend_beneath_stays_in_the_figure_and_leaves_the_panel_its_height(number, letters):
  heights = []
  for named in (False, True):
    figure, axes = figures.panels(1, 1, (6, 4))
    for i in range(number):
      name = f"{i:{letters}d}".replace(" ", "a")
      axes[0, 0].plot([0, 1], [i, i + 1], label=name if named else None)
    figures.legend(figure, axes)
    figure.draw_without_rendering()
    heights.append(axes[0, 0].get_window_extent().height)
  box, (legend,) = figure.bbox, figure.legends
  inside = legend.get_window_extent()
  assert inside.x0 >= box.x0 and inside.x1 <= box.x1 and inside.y0 >= box.y0
  assert heights[1] > 0.9 * heights[0]


def test_names_with_dollars_or_bytes_that_are_no_utf_8_are_drawn_as_they_are(tmp_path):
  archived = b"caf\xe9".decode(errors="surrogateescape")  # as Python reads an old folder's name
  names, image = ["under $10_$", f"$${archived}"], np.zeros((2, 4, 4, 3), np.uint8)
  drawn = [
    panels.confusion(np.eye(2), names),
    image_pictures.draw_mistakes(image, np.arange(2), np.eye(2)[::-1], names),
    mask_pictures.draw_confusion(np.eye(2), names),
    text_pictures.attention({"Block_0": np.eye(2)}, names, names),
  ]
  for figure in drawn:
    figures.save(figure, tmp_path / "a.png")
  labels = [label.get_text() for label in drawn[0].axes[0].get_xticklabels()]
  assert labels == [r"under \$10_\$", r"\$\$caf?"]
