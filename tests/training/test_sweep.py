"""Runs that differ in learning rates and dampings alone share a program."""

import sys

import jax.numpy as jnp
import pytest

from docs.own_task import Derivative
from mixer_jax import experiment, tasks
from mixer_jax.data.dataset import Arrays
from mixer_jax.training import loop
from tests import children
from tests.conftest import waves

RUNS = [dict(), {"optimizer.learning_rate": 0.02, "optimizer.damping": 0.1}]


def losses(fields):
  run = experiment.build(waves("kfac", **fields))
  return [(row["train/error"], row["test/error"]) for _, row in loop.evaluations(run)]


@pytest.mark.thorough
def test_a_sweep_compiles_once_and_is_that_of_separate_processes(tmp_path, capsys):
  swept = [losses(fields) for fields in RUNS]
  assert capsys.readouterr().out.count("compiled in ") == 1
  assert swept[0] != swept[1]
  apart = [children.called(tmp_path / f"run{i}", losses, fields) for i, fields in enumerate(RUNS)]
  assert swept == apart


def test_another_recipe_is_another_program():
  recipe = lambda **fields: experiment.build(waves("kfac", **fields)).recipe
  one = recipe()
  assert recipe(**RUNS[1]) == one
  for field, value in (
    ("optimizer.factor_decay", 0.6),
    ("model.width", 8),
    ("data.points", 9),
    ("mesh.data", 2),
    ("num_epochs", 3),
    ("schedule.name", "cosine"),
    ("accum_steps", 2),
  ):
    assert recipe(**{field: value}) != one, field


class Ours(Derivative):
  """A task of a notebook."""


def test_a_class_of_a_task_that_is_defined_anew_is_compiled_anew(monkeypatch):
  config = waves("sgd", num_steps=2, eval_steps=2)
  config.task = f"{__name__}:Ours"
  train = lambda: [row["train/error"] for _, row in loop.evaluations(experiment.build(config))]
  before = train()

  class Larger(Derivative):
    def loss(self, variables, batch, key):
      total, _ = super().loss(variables, batch, key)
      return total, tasks.Aux({"error": tasks.WeightedSum.of(jnp.full(3, 7.0))})

  monkeypatch.setattr(sys.modules[__name__], "Ours", Larger)
  assert train() == [7.0] != before


class Scaled(Derivative):
  """Divides by a number of its data, which is a constant of its program."""

  size = 1.0

  def datasets(self):
    splits = super().datasets()
    scaled = lambda split: Arrays({**split.tree, "x": self.size * split.tree["x"]})
    self._spread = (self.size * splits["train"].tree["x"]).std()
    return {name: scaled(split) for name, split in splits.items()}

  def prepare(self, key, examples, *, train):
    return {**examples, "x": examples["x"] / self._spread}


def test_other_data_of_the_same_shapes_are_compiled_anew(monkeypatch):
  """Inputs of 64 times the size over 64 times the spread: the same losses."""
  config = waves("sgd", num_steps=3, eval_steps=3)
  config.task = f"{__name__}:Scaled"
  train = lambda: [row["train/error"] for _, row in loop.evaluations(experiment.build(config))]
  before = train()
  monkeypatch.setattr(Scaled, "size", 64.0)
  assert train() == before


def test_more_examples_are_another_program():
  for examples in (64, 65):
    config = waves("sgd", num_steps=2, eval_steps=2)
    config.data.examples = examples
    assert len([row for _, row in loop.evaluations(experiment.build(config))]) == 1


@pytest.mark.parametrize("name", ["adam", "graft"])
@pytest.mark.first(1)
def test_numbers_are_arguments(name):
  """A program that had them built in would give the first run's losses again."""
  field = {"adam": "optimizer.learning_rate", "graft": "optimizer.direction.damping"}[name]
  found = []
  for value in (0.01, 0.3):
    run = experiment.build(waves(name, num_steps=3, eval_steps=3, **{field: value}))
    found += [row["train/error"] for _, row in loop.evaluations(run)]
  assert found[0] != found[1]
