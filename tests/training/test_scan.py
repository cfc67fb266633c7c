"""Training with scanned and rematerialised blocks against training without."""

import functools

import jax
import numpy as np
import pytest

from mixer_jax import experiment, export, models, pretrained
from mixer_jax.errors import UserError
from mixer_jax.rundir import metrics_file
from mixer_jax.training import loop, restore
from mixer_jax.training.state import init_state
from mixer_jax.training.trainer import Trainer
from tests.conftest import optimizer_of


@pytest.fixture
def run_of(tiny_config):
  """The experiment of an optimizer and some fields of the model, and its number of steps."""

  def build(optimizer, steps, **fields):
    config = tiny_config.copy_and_resolve_references()
    config.num_steps = config.eval_steps = config.checkpoint_steps = steps
    config.data.pad = 0
    config.model.update(fields)
    config.optimizer = optimizer_of(optimizer)
    return experiment.build(config)

  return build


def trained(run, params):
  trainer = Trainer(run, init_state(run, {"params": params}))
  trainer.advance()
  return jax.tree.map(np.asarray, trainer.state.params)


@pytest.mark.parametrize(
  "optimizer, steps, form",
  [
    pytest.param("sgd", 20, dict(scan_blocks=True), marks=pytest.mark.slow),
    pytest.param("adam", 20, dict(scan_blocks=True, remat=True), marks=pytest.mark.slow),
    # K-FAC, whose runs are chaotic, over the steps with two inverses.
    ("kfac", 6, dict(scan_blocks=True, remat=True)),
  ],
)
@pytest.mark.thorough
def test_the_same_steps(optimizer, steps, form, run_of):
  """K-FAC treats each layer apart, also where a loop goes over them."""
  run = run_of(optimizer, steps)
  start = jax.tree.map(np.asarray, jax.jit(run.task.init)(jax.random.key(0))["params"])
  end = trained(run, start)
  moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), end, start)
  assert max(jax.tree.leaves(moved)) > 0.03  # far more than the tolerance
  own = trained(run_of(optimizer, steps, **form), models.stacked(start))
  assert "MixerBlocks" in own
  close = functools.partial(np.testing.assert_allclose, rtol=2e-3, atol=2e-4)
  jax.tree.map(close, models.unrolled(own), end)


@pytest.mark.thorough
def test_a_scanned_run_takes_and_gives_public_weights(tiny_config, tmp_path):
  """Files have one layout; the run's own model has the other."""
  tiny_config.num_epochs = 1
  tiny_config.optimizer = optimizer_of("sgd")
  tiny_config.optimizer.learning_rate = 0.0  # nothing moves
  shapes = experiment.build(tiny_config).variable_shapes["params"]
  rng = np.random.default_rng(3)
  params = jax.tree.map(lambda x: rng.normal(0, 0.1, x.shape).astype(np.float32), shapes)
  pretrained.save(tmp_path / "in.npz", params)
  tiny_config.pretrained = str(tmp_path / "in.npz")
  tiny_config.any_normalization = True
  tiny_config.model.scan_blocks = True
  directory = loop.train(tiny_config, str(tmp_path / "run"))
  _, saved = restore.load_run(str(directory))
  assert saved["params"]["MixerBlocks"]["LayerNorm_0"]["scale"].shape == (2, 16)
  out = export.export(str(directory), "latest", str(tmp_path / "out.npz"))
  again = pretrained.read(str(out))
  assert again.arrays.keys() == pretrained.read(str(tmp_path / "in.npz")).arrays.keys()
  jax.tree.map(np.testing.assert_array_equal, again.fit(shapes), params)

  # How memory is spent may change at a restart, the layout of the checkpoint may not.
  tiny_config.model.remat = True
  loop.train(tiny_config, str(directory))
  assert len(metrics_file.read(directory)) == 1
  tiny_config.model.scan_blocks = False
  with pytest.raises(UserError, match=r"model\.scan_blocks was True, is False\. "):
    loop.train(tiny_config, str(directory))
