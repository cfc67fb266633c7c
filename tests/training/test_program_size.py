"""The size of the program of a step, of which the time to compile it is a function.

Seconds depend on the machine; lines of the program do not. The bounds are half as much again as the
programs had with JAX 0.9.1.
"""

import functools

import jax
import pytest

from mixer_jax import config as config_lib
from mixer_jax import experiment
from mixer_jax.training import step as step_lib
from mixer_jax.training.state import state_shapes


@pytest.mark.parametrize("optimizer, once, per_block", [("sgd", 700, 800), ("kfac", 3350, 2750)])
def test_a_block_adds_a_bounded_number_of_operations(tiny_config, optimizer, once, per_block):
  tiny_config.mesh.data = 1
  tiny_config.optimizer = config_lib.optimizer(optimizer, learning_rate=0.01)
  lines = {}
  for blocks in (1, 2):
    tiny_config.model.num_blocks = blocks
    run = experiment.build(tiny_config)
    step = jax.jit(functools.partial(step_lib.update, run))
    program = step.lower(state_shapes(run), run.batch_shapes).as_text()
    lines[blocks] = len(program.splitlines())
  growth = lines[2] - lines[1]
  assert 0 < growth < per_block
  assert lines[1] - growth < once
