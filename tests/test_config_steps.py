"""A training step of every config, at its own batch, is traced for one device."""

import functools

import jax
import pytest

from benchmarks import configs
from mixer_jax.training import step as step_lib
from mixer_jax.training.state import state_shapes

FILES = configs.chosen([])
QUICK = "multi30k", "sst2", "resnet_cifar"


@pytest.mark.parametrize("name", sorted(FILES, key=lambda name: (name not in QUICK, name)))
@pytest.mark.first(len(QUICK))
def test_a_step_is_traced(name, tmp_path):
  run = configs.built(*FILES[name], str(tmp_path))
  state = state_shapes(run)
  update = functools.partial(step_lib.update, run)
  new, _ = jax.eval_shape(update, state, run.batch_shapes)
  specs = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
  assert specs(new) == specs(state)
