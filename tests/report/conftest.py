"""A study of two models and four optimizers without runs; the figures that were saved."""

import pytest

from mixer_jax.report import figures
from mixer_jax.study import Published
from tests.report.written_runs import begin, config


@pytest.fixture
def opened(tmp_path):
  return begin(
    tmp_path,
    config,
    axes={"model": ("m1", "m2"), "optimizer": ("sgd", "kfac", "sgd_kfac", "kfac_sgd")},
    seeds=(0, 1, 2),
    published={("m1", "sgd"): Published(60.5, 38), ("m1", "sgd_kfac"): Published(75.47)},
    published_at="best",
    source="Table 2",
    notes=["A note."],
  )


@pytest.fixture
def saved(monkeypatch):
  """The figures that were saved, by the names of their files."""
  drawn, save = {}, figures.save
  spy = lambda figure, path: (drawn.update({path.name: figure}), save(figure, path))[1]
  monkeypatch.setattr(figures, "save", spy)
  return drawn
