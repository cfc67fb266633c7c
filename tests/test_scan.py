"""Training with scanned and rematerialised blocks against training without."""

import functools

import jax
import numpy as np
import pytest

from mixer_jax import config as config_lib
from mixer_jax import errors, experiment, export, models, pretrained, train, workdir
from mixer_jax.checkpoint import Checkpoints

OPTIMIZERS = {
  "sgd": dict(learning_rate=0.1),
  # A large eps, or it scales up gradients that are zero but for rounding.
  "adam": dict(learning_rate=1e-2, eps=1e-2),
  "kfac": dict(learning_rate=0.05, factor_period=2, inverse_period=4, factor_decay=0.5),
}


@pytest.fixture
def run_of(tiny_config):
  """The experiment of an optimizer and some fields of the model, 20 steps in 4 epochs."""

  def build(optimizer, **fields):
    config = tiny_config.copy_and_resolve_references()
    config.data.update(train_split="train[:160]", pad=0)
    config.model.update(fields)
    config.optimizer = config_lib.optimizer(optimizer, **OPTIMIZERS[optimizer])
    return experiment.build(config)

  return build


def after_20_steps(run, params):
  state, trainer = train.init_state(run, params), train.EpochTrainer(run)
  for epoch in (1, 2, 3, 4):
    state, _, _ = trainer(state, epoch)
  assert int(state.step) == 20
  return jax.tree.map(np.asarray, state.params)


@pytest.mark.parametrize(
  "optimizer, form",
  [
    ("sgd", dict(scan_blocks=True)),
    ("adam", dict(scan_blocks=True, remat=True)),
    ("kfac", dict(scan_blocks=True, remat=True)),
  ],
)
def test_twenty_steps_are_the_same(optimizer, form, run_of):
  """K-FAC treats each layer apart, also where a loop goes over them."""
  run = run_of(optimizer)
  start = jax.tree.map(np.asarray, jax.jit(run.task.init)(jax.random.key(0)))
  end = after_20_steps(run, start)
  moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), end, start)
  assert max(jax.tree.leaves(moved)) > 0.05  # far more than the tolerance
  own = after_20_steps(run_of(optimizer, **form), models.stacked(start))
  assert "MixerBlocks" in own
  close = functools.partial(np.testing.assert_allclose, rtol=2e-3, atol=2e-4)
  jax.tree.map(close, models.unrolled(own), end)


def test_a_scanned_run_takes_and_gives_public_weights(tiny_config, tmp_path):
  """Files have one layout; the run's own model has the other."""
  tiny_config.num_epochs = 1
  tiny_config.optimizer = config_lib.optimizer("sgd", learning_rate=0.0)  # nothing moves
  shapes = experiment.build(tiny_config).param_shapes
  rng = np.random.default_rng(3)
  params = jax.tree.map(lambda x: rng.normal(0, 0.1, x.shape).astype(np.float32), shapes)
  pretrained.save(tmp_path / "in.npz", params)
  tiny_config.pretrained = str(tmp_path / "in.npz")
  tiny_config.any_normalization = True
  tiny_config.model.scan_blocks = True
  directory = train.train(tiny_config, str(tmp_path / "run"))
  saved = Checkpoints(directory, read_only=True)
  assert saved.restore_arrays(saved.latest())["MixerBlocks"]["LayerNorm_0"]["scale"].shape == (
    2,
    16,
  )
  out = export.export(str(directory), "latest", str(tmp_path / "out.npz"))
  again = pretrained.read(str(out))
  assert again.arrays.keys() == pretrained.read(str(tmp_path / "in.npz")).arrays.keys()
  jax.tree.map(np.testing.assert_array_equal, again.fit(shapes), params)

  # How memory is spent may change at a restart, the layout of the checkpoint may not.
  tiny_config.model.remat = True
  train.train(tiny_config, str(directory))
  assert len(workdir.read_metrics(directory)) == 1
  tiny_config.model.scan_blocks = False
  with pytest.raises(errors.UserError, match=r"model\.scan_blocks was True, is False\. "):
    train.train(tiny_config, str(directory))
