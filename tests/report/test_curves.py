"""The panels of a run's curves, and the picture."""

import json

import numpy as np
from PIL import Image
import pytest

from mixer_jax import config as config_lib
from mixer_jax.errors import UserError
from mixer_jax.report import curves
from mixer_jax.tasks import Metric
from tests.study.grid import errors


def test_a_panel_a_metric_and_one_for_the_learning_rate():
  keys = ["step", "epoch", "train/loss", "train/top1", "test/loss", "test/top1", "test/top5"]
  keys += [
    "test/best_top1",
    "test/best_step",
    "train/norm.magnitude.stem",
    "learning_rate",
    "seconds",
  ]
  found = curves.panels(keys, ("top1", "bleu"))
  assert list(found.items()) == [
    ("top1", ["train/top1", "test/top1"]),
    ("loss", ["train/loss", "test/loss"]),
    ("top5", ["test/top5"]),
    ("learning rate", ["learning_rate"]),
  ]


def test_a_test_set_may_be_a_file_in_a_folder():
  keys = ["train/loss", "own/more.tsv/loss", "own/more.tsv/best_loss"]
  assert curves.panels(keys, ["loss"]) == {"loss": keys[:2], "learning rate": ["learning_rate"]}


def test_labels_have_the_unit():
  assert Metric("top1", True, percent=True).label == "top1 (%)"
  assert Metric("loss", False, unit="nats").label == "loss (nats)"
  assert Metric("error", False).label == "error"


@pytest.mark.parametrize("config", [config_lib.default(), errors("sgd")])
@pytest.mark.thorough
def test_any_run_is_drawn(config, tmp_path):
  (tmp_path / "config.json").write_text(config.to_json())
  with pytest.raises(UserError, match=r"holds no metrics \(no lines in metrics.jsonl\)"):
    curves.draw(tmp_path)
  rows = [
    {"step": s, "epoch": s / 9, "seconds": 1.0, "learning_rate": 1 / s, "test/error": 1 / s}
    | ({"train/error": 2 / s} if s > 1 else {})  # a metric may begin late
    for s in (1, 2, 3, 4)
  ]
  (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  pixels = np.asarray(Image.open(curves.draw(tmp_path)).convert("RGB"))
  assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 20  # more than an empty frame
