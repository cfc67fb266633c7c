"""Lengths of grafted steps: by hand, by kind of layer, and in a run's log."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mixer_jax import config as config_lib
from mixer_jax import experiment, optim
from mixer_jax.optim.graft import squared_norms
from mixer_jax.rundir import metrics_file
from mixer_jax.training import loop, restore
from tests.conftest import waves


def test_squares_are_those_of_both_updates():
  """Two optimizers whose updates are known: -0.5 g and -0.1 g."""
  params = {
    "stem": {"kernel": jnp.zeros(2)},
    "head": {"kernel": jnp.zeros(1), "bias": jnp.zeros(1)},
  }
  grads = {
    "stem": {"kernel": jnp.array([3.0, 4.0])},
    "head": {"kernel": jnp.array([2.0]), "bias": jnp.array([1.0])},
  }
  kind = lambda path: path.partition("/")[0]
  tx = optim.graft(optax.sgd(0.5), optax.sgd(0.1))
  state = tx.init(params)
  assert {float(x) for x in squared_norms(state, kind).values()} == {0.0}
  _, state = tx.update(grads, state, params)
  expected = {
    "norm.magnitude.stem": 0.25 * 25,
    "norm.magnitude.head": 0.25 * 5,
    "norm.direction.stem": 0.01 * 25,
    "norm.direction.head": 0.01 * 5,
  }
  found = {k: float(v) for k, v in squared_norms(state, kind).items()}
  assert found == pytest.approx(expected)
  assert squared_norms(optax.sgd(0.1).init(params), kind) == {}


@pytest.mark.thorough
def test_a_run_logs_their_root_mean_squares(tmp_path):
  """Adam's first step is its rate in each number; SGD's lengths are those of the run's steps."""
  config = waves(num_steps=2, eval_steps=1)
  sides = (config_lib.optimizer("sgd", 0.5), config_lib.optimizer("adam", 3e-3))
  config.optimizer = config_lib.grafted(*sides)
  path = loop.train(config, str(tmp_path))
  row, second = metrics_file.read(path)
  numbers = 16 * 8 + 8  # of the last layer
  assert row["train/norm.direction.Dense_2"] == pytest.approx(3e-3 * np.sqrt(numbers), rel=1e-2)
  ends = [restore.load_run(str(path), step)[1]["params"] for step in ("1", "2")]
  moved = np.concatenate([np.ravel(b - a) for a, b in zip(*(p["Dense_1"].values() for p in ends))])
  assert second["train/norm.magnitude.Dense_1"] == pytest.approx(np.linalg.norm(moved), rel=1e-3)
  config.eval_steps = 2
  (both,) = (row for _, row in loop.evaluations(experiment.build(config)))
  names = [name for name in row if "norm." in name]
  assert len(names) == 6
  for name in names:
    mean = np.sqrt((row[name] ** 2 + second[name] ** 2) / 2)
    assert both[name] == pytest.approx(mean, rel=1e-4)
