"""The row of a training benchmark against counts made by hand."""

import dataclasses

import pytest

from benchmarks import optimizers, train


def with_optimizer(run, name):
  config = run.config.copy_and_resolve_references()
  config.optimizer = optimizers.optimizer_config(name)
  return dataclasses.replace(run, config=config)


def test_operations_of_a_step_by_hand(tiny_run):
  # 4 tokens of 4x4x3 pixels, 16 channels, a block of 8 and 32 hidden units, 4 classes.
  block = 16 * 2 * 4 * 8 + 4 * 2 * 16 * 32
  assert train.step_flops(tiny_run) == 6 * 32 * (4 * 48 * 16 + block + 16 * 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sgd", "kfac"])
def test_a_row(tiny_run, name, monkeypatch):
  monkeypatch.setattr(train, "_PRODUCT_SIZE_ON_CPU", 128)
  row = train.measure(with_optimizer(tiny_run, name), rounds=1)
  assert (row.model, row.optimizer, row.batch_size) == ("mixer_small", name, 32)
  assert row.first_step > row.step > 0.0  # the first one is compiled
  assert row.utilisation > 0.0 and row.input_ratio > 0.0
  assert row.peak_bytes > tiny_run.datasets["train"].arrays()["image"].nbytes


@pytest.mark.thorough
def test_a_model_that_does_not_fit_is_not_run(tiny_run, monkeypatch):
  monkeypatch.setattr(train, "fits", lambda size: False)
  monkeypatch.setattr(train, "take_turns", None)
  row = train.measure(with_optimizer(tiny_run, "sgd"), rounds=1)
  assert row.step is None and row.peak_bytes > 0
  assert train.cells(row)[2:5] == ["-", "-", "-"]
