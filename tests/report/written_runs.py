"""Runs of small studies, written by hand: their rows, their records; tables of the report."""

import json

import numpy as np

from mixer_jax import config as config_lib
from mixer_jax.study import Study, record
from tests.study.grid import errors

EPOCHS = 4
KINDS = ("stem", "token_mixing", "channel_mixing", "norms", "head")


def begin(path, config, axes, seeds=(0,), **fields):
  """The record of a study without runs."""
  path.mkdir(exist_ok=True)
  return record.open_study(path, Study("t", config, axes, seeds, **fields), "file.py", [])


def config(model, optimizer):
  config = config_lib.default()
  config.num_epochs = EPOCHS
  config.target = 0.5
  sides = [config_lib.optimizer(name, learning_rate=0.1) for name in optimizer.split("_")]
  config.optimizer = config_lib.grafted(*sides) if sides[1:] else sides[0]
  return config


def pair(optimizer):
  """A config of `tests.study.grid.Errors` with a grafted pair, whatever the name."""
  made = errors("sgd")
  made.optimizer = config_lib.grafted(*(config_lib.optimizer(n, 0.1) for n in ("sgd", "adam")))
  return made


def rows(name, top1):
  """The rows of a run with these test accuracies, one an epoch of ten steps."""
  rng = np.random.default_rng(sum(map(ord, name)))
  for epoch, accuracy in enumerate(top1, 1):
    row = {
      "epoch": float(epoch),
      "step": 10 * epoch,
      "train/loss": 1 - accuracy,
      "test/top1": accuracy,
      "test/loss": 2 - accuracy,
      "test/best_top1": max(top1[:epoch]),
      "test/best_step": 10 * (1 + int(np.argmax(top1[:epoch]))),
      "seconds": float(rng.uniform(50, 70)),
    }
    if "_" in name:
      sides = (f"train/norm.{side}.{kind}" for side in ("magnitude", "direction") for kind in KINDS)
      row |= {key: float(rng.uniform(1e-3, 1)) for key in sides}
    yield row


def error_row(step=10, error=0.5, **more):
  """A row of a run of `tests.study.grid.Errors`, the best so far."""
  best = {"test/best_error": error, "test/best_step": step}
  return {"step": step, "epoch": step / 20, "seconds": 1.0, "test/error": error} | best | more


def session(**fields):
  return {
    "commit": "0123456789ab",
    "versions": {"mixer_jax": "0.1.0", "jax": "0.9.1"},
    "device": {"platform": "gpu", "kind": "H200", "count": 1},
    "data": {"name": "cifar10", "train": 50000, "test": 10000, "classes": 10},
    "from_step": 0,
    "started": "2026-01-01T00:00:00+00:00",
    "ended": "2026-01-01T01:00:00+00:00",
  } | fields


def write_run(opened, name, written, reason="", finished=True, **fields):
  """Fabricates a run's directory with rows, or the rows of accuracies; returns its rows."""
  (run,) = [run for run in opened.runs if run.name == name]
  path = opened.path(run)
  path.mkdir()
  written = written if isinstance(written, list) else list(rows(name, written))
  (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
  (path / "run.json").write_text(json.dumps({"sessions": [session(**fields)]}))
  if finished:
    opened.finish(run, reason)
  return written


def line_of(text, *start):
  (line,) = [line for line in text.splitlines() if line.startswith("| " + " | ".join(start) + " |")]
  return [cell.strip() for cell in line.strip("|").split(" |")]


def cells_of(text, *start):
  """The line of the table of results that starts so, by the table's header."""
  table = text.split("## Results")[1].split("\n\n")[1]
  header = table.splitlines()[0].strip("|").split("|")
  return dict(zip(map(str.strip, header), line_of(table, *start), strict=True))
