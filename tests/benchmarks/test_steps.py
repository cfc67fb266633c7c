"""Steps on one batch, and on real data, are those of training."""

import jax
import numpy as np
import optax
import pytest

from benchmarks import optimizers, steps
from mixer_jax import experiment
from mixer_jax.training import state, trainer


@pytest.mark.thorough
def test_real_data_train_as_the_trainer_does(tiny_run):
  real = steps.Real(tiny_run).start()
  for _ in range(4):  # 8 steps, an epoch
    real()
  expected = trainer.Trainer(tiny_run, state.init_state(tiny_run))
  expected.advance()
  assert int(real.state.step) == expected.step == 8
  jax.tree.map(np.testing.assert_array_equal, real.state.params, expected.state.params)


def test_counts_decide_what_kfac_renews(tiny_config):
  """Also those inside of the state that has the rates: otherwise no step with factors is timed."""
  tiny_config.model.num_blocks = 1
  tiny_config.optimizer = optimizers.optimizer_config("kfac")
  run = experiment.build(tiny_config)
  fixed = steps.Fixed(run, steps.batch(run)).start()
  inverses = lambda: jax.device_get(optax.tree.get(fixed.state.opt_state, "inverses"))
  fixed(0)
  first = inverses()
  fixed(1)
  jax.tree.map(np.testing.assert_array_equal, first, inverses())
  fixed(100)
  changed = jax.tree.map(lambda a, b: not np.array_equal(a, b), first, inverses())
  assert any(jax.tree.leaves(changed))
  fixed(calls=3)  # the updates of its own, from 0
  counts = optax.tree.get_all_with_path(fixed.state.opt_state, "count")
  assert {int(count) for _, count in counts} == {3}
  assert int(fixed.state.step) == 6
