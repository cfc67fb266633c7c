"""A study of two models and four optimizers without runs."""

import pytest

from mixer_jax.study import Published, Study, record
from tests.report.written_runs import config


@pytest.fixture
def opened(tmp_path):
  study = Study(
    title="Title",
    config=config,
    axes={"model": ("m1", "m2"), "optimizer": ("sgd", "kfac", "sgd_kfac", "kfac_sgd")},
    published={("m1", "sgd"): Published(60.5, 38), ("m1", "sgd_kfac"): Published(75.47)},
    published_at="best",
    source="Table 2",
    notes=["A note."],
  )
  return record.open_study(tmp_path, study, "file.py", [])
