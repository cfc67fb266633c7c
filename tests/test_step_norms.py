"""Lengths of grafted steps: by hand, by kind of layer, and in a run's log."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mixer_jax import checkpoint, models, optim, step_norms, train, workdir
from mixer_jax import config as config_lib
from mixer_jax.optim.blocks import path_name

EXPECTED = {
  "mixer_small": {
    "stem": {"stem/kernel", "stem/bias"},
    "head": {"head/kernel", "head/bias"},
    "norms": {"pre_head_layer_norm/scale", "MixerBlock_0/LayerNorm_1/bias"},
    "token_mixing": {"MixerBlock_0/token_mixing/Dense_0/kernel"},
    "channel_mixing": {"MixerBlock_0/channel_mixing/Dense_1/bias"},
  },
  "resmlp_s12": {
    "stem": {"stem/kernel"},
    "head": {"head/kernel"},
    "norms": {"ResMlpBlock_0/norm1/scale", "ResMlpBlock_0/layer_scale_2/scale", "norm/bias"},
    "token_mixing": {"ResMlpBlock_0/cross_patch/kernel"},
    "channel_mixing": {"ResMlpBlock_0/cross_channel/Dense_0/kernel"},
  },
  "gmlp_small": {
    "stem": {"stem/kernel"},
    "head": {"head/kernel"},
    "norms": {"GmlpBlock_0/norm/scale", "GmlpBlock_0/spatial_gating/norm/scale", "norm/scale"},
    "token_mixing": {"GmlpBlock_0/spatial_gating/Dense_0/kernel"},
    "channel_mixing": {"GmlpBlock_0/Dense_0/kernel", "GmlpBlock_0/Dense_1/kernel"},
  },
}


@pytest.mark.parametrize("name", EXPECTED)
def test_kinds_of_layers(name):
  model = models.build(name, 10, patch_size=4, hidden_dim=8, num_blocks=1)
  images = jax.ShapeDtypeStruct((1, 8, 8, 3), "float32")
  params = jax.eval_shape(model.init, jax.random.key(0), images)["params"]
  found = {group: set() for group in step_norms.GROUPS}
  for path, _ in jax.tree_util.tree_leaves_with_path(params):
    found[step_norms.group(path_name(path))].add(path_name(path))
  for group, some in EXPECTED[name].items():
    assert some <= found[group]
  scales = {path for paths in found.values() for path in paths if path.endswith("/scale")}
  assert scales == {path for path in found["norms"] if not path.endswith("/bias")}


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
  tx = optim.graft(optax.sgd(0.5), optax.sgd(0.1))
  state = tx.init(params)
  assert {float(x) for x in step_norms.squares(state).values()} == {0.0}
  _, state = tx.update(grads, state, params)
  expected = {
    "norm/magnitude/stem": 0.25 * 25,
    "norm/magnitude/head": 0.25 * 5,
    "norm/direction/stem": 0.01 * 25,
    "norm/direction/head": 0.01 * 5,
  }
  assert {k: float(v) for k, v in step_norms.squares(state).items()} == pytest.approx(expected)
  assert step_norms.squares(optax.sgd(0.1).init(params)) == {}


def test_means_are_over_all_steps():
  windows = [{"a": jnp.array([1.0, 9.0])}, {"a": jnp.array([4.0, 2.0])}]
  assert step_norms.root_mean(windows) == {"a": pytest.approx(2.0)}  # of 1, 9, 4, 2
  assert step_norms.root_mean([{}, {}]) == {}


def test_a_run_logs_them(tiny_config, tmp_path):
  """One step from a zero head: only the head moves, Adam by its rate in each number."""
  config = tiny_config
  config.num_epochs = 1
  config.data.train_split = "train[:32]"
  sides = (config_lib.optimizer("sgd", 0.5), config_lib.optimizer("adam", 3e-3))
  config.optimizer = config_lib.grafted(*sides)
  path = train.train(config, str(tmp_path))
  (row,) = workdir.read_metrics(path)
  numbers = 16 * 4 + 4  # of the head: channels by classes, and biases
  assert row["train/norm/direction/head"] == pytest.approx(3e-3 * np.sqrt(numbers), rel=1e-3)
  saved = checkpoint.Checkpoints(path, read_only=True)
  head = saved.restore_arrays(1)["head"]  # was zero: it is the step, as long as SGD's
  moved = np.sqrt(sum(np.sum(np.square(x)) for x in head.values()))
  assert row["train/norm/magnitude/head"] == pytest.approx(moved, rel=1e-5)
  for group in ("stem", "token_mixing", "channel_mixing", "norms"):
    assert row[f"train/norm/magnitude/{group}"] == row[f"train/norm/direction/{group}"] == 0.0


def test_a_stop_file_ends_a_run_with_a_checkpoint(tiny_config, tmp_path, capsys):
  config = tiny_config
  config.num_epochs, config.checkpoint_epochs = 3, 3
  (tmp_path / train.STOP).touch()
  train.train(config, str(tmp_path))
  assert "stopped: 1 epochs" in capsys.readouterr().out
  assert checkpoint.Checkpoints(tmp_path, read_only=True).latest() == 256 // 32
  assert not (tmp_path / train.STOP).exists()
  train.train(config, str(tmp_path))
  assert [row["epoch"] for row in workdir.read_metrics(tmp_path)] == [1, 2, 3]
  assert "done: 3 epochs" in capsys.readouterr().out
