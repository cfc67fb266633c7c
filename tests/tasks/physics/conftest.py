"""What the tests of equations share."""

import jax
import numpy as np
import pytest

from mixer_jax import config as config_lib
from mixer_jax.tasks.physics.equations import cavity, waves


@pytest.fixture(autouse=True)
def quick_references(monkeypatch, tmp_path_factory):
  """References of low resolution, in a cache of the session."""
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
  monkeypatch.setattr(cavity, "_CELLS", 16)
  quick = dict.fromkeys(waves.RESOLUTIONS, (64, 0.001, np.float64))
  monkeypatch.setattr(waves, "RESOLUTIONS", quick)
  monkeypatch.setattr(waves, "_POINTS", 32)


@pytest.fixture
def float64():
  """JAX's floats are 64 bits wide in a test, and 32 after it."""
  before = jax.config.jax_enable_x64
  jax.config.update("jax_enable_x64", True)
  yield
  jax.config.update("jax_enable_x64", before)


def small(problem="poisson_2d", optimizer="adam", **values):
  """A run of a second or so: a narrow net, few points, one device."""
  config = config_lib.default("physics", "mlp")
  config.problem.name = problem
  config.batch_size, config.eval_batch_size, config.mesh.data = 1, 128, 1
  config.num_steps, config.eval_steps, config.checkpoint_steps = 20, 10, 5
  config.test_points = 300
  config.model.hidden_dims = (8, 8)
  config.optimizer = config_lib.optimizer(optimizer, learning_rate=1e-2)
  config.update_from_flattened_dict(values)
  return config
