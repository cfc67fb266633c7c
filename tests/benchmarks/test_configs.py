"""The rows of configs: batch, memory and rate of a step."""

import dataclasses

import jax

from benchmarks import configs
from mixer_jax import experiment


def test_a_row(tiny_config):
  run = experiment.build(tiny_config)
  row = configs.measure("tiny", run, rounds=1)
  numbers = sum(x.size for x in jax.tree.leaves(run.variable_shapes))
  kept = 4 * (3 * numbers + tiny_config.batch_size * 8 * 8 * 3)  # Adam's, and one batch
  assert row.batch_size == tiny_config.batch_size and row.seconds > 0
  assert kept < row.peak_bytes < 2**24


def test_a_step_is_planned_without_being_timed(tiny_config):
  run = experiment.build(tiny_config)
  plans = []
  for size in (1, 4):
    config = tiny_config.copy_and_resolve_references()
    config.batch_size *= size
    row = configs.measure("tiny", dataclasses.replace(run, config=config), rounds=0)
    assert row.seconds is None
    plans.append(row.peak_bytes)
  assert plans[0] < plans[1] < 8 * plans[0]


def test_configs_are_chosen_by_name_and_argument():
  files = configs.chosen([])
  assert {argument for _, argument in files.values()} == {None} and "quickstart" in files
  (path, argument), (_, default) = configs.chosen(["graft_cifar10:b16,sgd,kfac", "mlm"]).values()
  assert (path.name, argument, default) == ("graft_cifar10.py", "b16,sgd,kfac", None)


def test_fields_of_a_config_are_set(tmp_path):
  (chosen,) = configs.chosen(["quickstart:sgd"]).values()
  run = configs.built(*chosen, str(tmp_path), ["batch_size=32", "accum_steps=4"])
  assert (run.config.optimizer.name, run.config.batch_size, run.config.accum_steps) == (
    "sgd",
    32,
    4,
  )
