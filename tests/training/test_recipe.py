"""Training with the recipe of DeiT: stops and K-FAC."""

import jax
import numpy as np
import pytest

from mixer_jax import config as config_lib
from mixer_jax import experiment, recipes
from mixer_jax.training.state import init_state
from mixer_jax.training.trainer import Trainer


@pytest.fixture
def recipe(tiny_config):
  """An epoch of 8 steps of a tiny Mixer, 3 copies of each example."""
  recipes.deit(tiny_config)
  tiny_config.num_epochs, tiny_config.model.num_blocks = 1, 1
  tiny_config.data.repeats = 3
  tiny_config.schedule.warmup_epochs = 0.5
  tiny_config.ema_decay = 0.9
  return tiny_config


@pytest.mark.thorough
def test_a_stopped_run_goes_on_with_the_same_bits(recipe):
  run = experiment.build(recipe)
  assert run.clock.num_steps == 8 and run.order.repeats == 3
  whole = Trainer(run, init_state(run))
  whole.advance()
  first = Trainer(run, init_state(run))
  first.advance(lambda: first.step == 5)
  assert first.step == 5
  second = Trainer(run, first.state)
  second.advance()
  for a, b in zip(jax.tree.leaves(whole.state), jax.tree.leaves(second.state), strict=True):
    np.testing.assert_array_equal(a, b)
  row = whole.report()
  assert row["train/loss"] > 1.0 and 0 <= row["train/top1"] <= 1
  averaged, params = whole.state.variables["average"], whole.state.params
  assert not np.allclose(averaged["head"]["bias"], params["head"]["bias"])


@pytest.mark.parametrize(
  "loss, estimation", [("softmax", "empirical"), ("binary", "empirical"), ("binary", "sampled")]
)
@pytest.mark.thorough
def test_kfac_takes_mixed_labels(recipe, loss, estimation):
  recipe.augment.policy, recipe.augment.erasing, recipe.loss = "", 0.0, loss
  recipe.num_steps, recipe.ema_decay = 2, 0.0
  fields = dict(estimation=estimation, factor_period=1, inverse_period=1)
  recipe.optimizer = config_lib.optimizer("kfac", learning_rate=1e-3, **fields)
  recipe.schedule.update(name="constant", warmup_epochs=0.0)
  run = experiment.build(recipe)
  trainer = Trainer(run, init_state(run))
  trainer.advance()
  assert trainer.step == 2 and np.isfinite(trainer.report()["train/loss"])
