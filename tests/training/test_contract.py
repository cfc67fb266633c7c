"""Tasks of one's own whose methods answer otherwise than the contract says: one line, before compiling."""

import jax.numpy as jnp
import numpy as np
import pytest

from docs.own_task import Derivative
from mixer_jax import experiment, tasks
from mixer_jax.data.dataset import Arrays
from mixer_jax.errors import UserError
from mixer_jax.training import contract, loop
from tests.conftest import waves
from tests.training.collections_task import WithCollections


def answers(method, change):
  """The task of the docs with one method's answer changed."""

  class Own(Derivative):
    pass

  setattr(Own, method, lambda self, *args: change(getattr(Derivative, method)(self, *args)))
  return Own


WRONG = {
  "a loss alone": ("loss", lambda found: found[0], "loss gives .*; allowed: a pair of"),
  "a scalar": ("loss", lambda found: (jnp.ones(()), found[1]), "loss gives .*; allowed: a pair of"),
  "a number in Aux": (
    "loss",
    lambda found: (found[0], tasks.Aux({"error": jnp.ones(())})),
    "loss gives .*error.*; allowed: a mapping of sums such as tasks.WeightedSum.of",
  ),
  "a new collection": (
    "loss",
    lambda found: (found[0], found[1]._replace(collections={"means": jnp.ones(3)})),
    "loss gives the collection means",
  ),
  "numbers": ("evaluate", lambda found: {"error": jnp.ones(3)}, "evaluate gives .*error"),
  "another name": (
    "evaluate",
    lambda found: {"loss": found["error"]},
    r"evaluate gives \['loss'\]; allowed: 'error', the first of metrics",
  ),
  "parameters alone": ("init", lambda found: found["params"], r"init gives \['Dense_0'"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_answers_are_checked_before_compiling(mistake, monkeypatch):
  *changed, message = WRONG[mistake]
  monkeypatch.setattr(f"{__name__}.Own", answers(*changed), raising=False)
  config = waves("sgd", num_steps=1, eval_steps=1)
  config.task = f"{__name__}:Own"
  with pytest.raises(UserError, match=f"^task {__name__}:Own: {message}"):
    next(loop.evaluations(experiment.build(config)))


def test_the_primary_metric_of_a_frozen_task_is_checked(monkeypatch):
  monkeypatch.setattr(f"{__name__}.Own", answers(*WRONG["another name"][:2]), raising=False)
  config = waves("sgd", num_steps=1, eval_steps=1, freeze="Dense_0")
  config.task = f"{__name__}:Own"
  with pytest.raises(UserError, match="allowed: 'error', the first of metrics"):
    contract.check_task(experiment.build(config))


COLLECTIONS = {
  "another shape": ({"mean": jnp.zeros((1, 8))}, "the collection statistics/mean"),
  "integers": ({"mean": jnp.zeros(8, int)}, "the collection statistics/mean"),
  "another name": ({"means": jnp.zeros(8)}, "the collection statistics/means"),
  "nothing": ({}, "no collection statistics/mean"),
}


def test_a_collection_may_be_a_number(monkeypatch):
  class Own(Derivative):
    def init(self, key):
      return super().init(key) | {"seen": {"steps": jnp.zeros((), int)}}

    def loss(self, variables, batch, key):
      loss, aux = super().loss({"params": variables["params"]}, batch, key)
      return loss, aux._replace(collections={"seen": {"steps": variables["seen"]["steps"] + 1}})

    def evaluate(self, variables, batch, mask):
      return super().evaluate({"params": variables["params"]}, batch, mask)

  monkeypatch.setattr(f"{__name__}.Own", Own, raising=False)
  config = waves("sgd", task=f"{__name__}:Own", num_steps=3, eval_steps=3)
  [(state, _)] = loop.evaluations(experiment.build(config))
  assert state.variables["seen"]["steps"] == 3


@pytest.mark.parametrize("mistake", COLLECTIONS)
def test_changed_collections_are_those_of_init(mistake, monkeypatch):
  changed, message = COLLECTIONS[mistake]

  class Own(WithCollections):
    def loss(self, *args):
      loss, aux = super().loss(*args)
      return loss, aux._replace(collections={"statistics": changed})

  monkeypatch.setattr(f"{__name__}.Own", Own, raising=False)
  with pytest.raises(UserError, match=f"^task {__name__}:Own: loss gives {message}"):
    contract.check_task(experiment.build(waves("sgd", task=f"{__name__}:Own")))


class Scaled(Derivative):
  """With a further split, whose examples have another array."""

  def datasets(self):
    test = super().datasets()["test"]
    further = Arrays(test.tree | {"scale": np.ones(len(test), np.float32)})
    return super().datasets() | {self.further: further}


def test_each_split_that_is_evaluated_is_checked(monkeypatch):
  class Own(Scaled):
    further = "validation"

    def evaluate(self, variables, batch, mask):
      return batch if "scale" in batch else super().evaluate(variables, batch, mask)

  monkeypatch.setattr(f"{__name__}.Own", Own, raising=False)
  config = waves("sgd", task=f"{__name__}:Own")
  with pytest.raises(UserError, match="evaluate gives .*scale"):
    contract.check_task(experiment.build(config))


def test_a_further_split_may_lack_the_primary_metric(monkeypatch):
  class Own(Scaled):
    further = "scaled"

    def evaluate(self, variables, batch, mask):
      sums = super().evaluate(variables, batch, mask)
      return {"scaled": sums["error"]} if "scale" in batch else sums

  monkeypatch.setattr(f"{__name__}.Own", Own, raising=False)
  run = experiment.build(waves("sgd", task=f"{__name__}:Own", num_steps=1, eval_steps=1))
  [(_, row)] = loop.evaluations(run)
  assert {"test/error", "scaled/scaled"} <= row.keys()


def test_metrics_are_those_of_the_class(monkeypatch):
  """Reports and studies read them of a task that is not built."""
  run = experiment.build(waves("sgd"))
  run.task.metrics = (tasks.Metric("other", False), *type(run.task).metrics)
  with pytest.raises(UserError, match="metrics gives .*those of the class"):
    contract.check_task(run)
  monkeypatch.delattr(type(run.task), "metrics")
  with pytest.raises(UserError, match="metrics of task .* is None; allowed: an attribute of the"):
    tasks.find(run.config.task)


@pytest.mark.parametrize("optimizer", ["sgd", "kfac"])
def test_the_task_of_the_docs_keeps_the_contract(optimizer):
  contract.check_task(experiment.build(waves(optimizer, accum_steps=2, freeze="Dense_0")))
