"""The panels of a run's curves, and the picture."""

import json

import numpy as np
from PIL import Image
import pytest

from mixer_jax import config as config_lib
from mixer_jax.errors import UserError
from mixer_jax.report import curves
from tests.report.written_runs import error_row
from tests.study.grid import errors


def test_a_panel_a_metric_and_one_for_the_learning_rate():
  """Not for best values, norms and times; a test set may be a file in a folder."""
  keys = [
    "step",
    "epoch",
    "train/loss",
    "train/top1",
    "test/loss",
    "own/more.tsv/loss",
    "test/top1",
  ]
  keys += ["test/top5", "test/best_top1", "test/best_step", "train/norm.magnitude.stem"]
  found = curves.panels([*keys, "learning_rate", "seconds"], ("top1", "bleu"))
  assert list(found.items()) == [
    ("top1", ["train/top1", "test/top1"]),
    ("loss", ["train/loss", "test/loss", "own/more.tsv/loss"]),
    ("top5", ["test/top5"]),
    ("learning rate", ["learning_rate"]),
  ]


@pytest.mark.parametrize("config", [config_lib.default(), errors("sgd")])
def test_any_run_is_drawn(config, tmp_path):
  (tmp_path / "config.json").write_text(config.to_json())
  with pytest.raises(UserError, match="no lines in metrics.jsonl"):
    curves.draw(tmp_path)
  late = lambda s: {"train/error": 2 / s} if s > 1 else {}  # a metric may begin late
  rows = [error_row(s, 1 / s, learning_rate=1 / s) | late(s) for s in (1, 2, 3, 4)]
  (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  pixels = np.asarray(Image.open(curves.draw(tmp_path)).convert("RGB"))
  assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 20  # more than an empty frame
