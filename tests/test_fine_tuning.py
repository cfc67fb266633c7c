"""Runs that start from weights: what they take over, and what they do not need."""

from flax import traverse_util
import jax
import numpy as np
import pytest

from mixer_jax import config as config_lib
from mixer_jax import evaluate, experiment, export, pretrained, train, workdir
from mixer_jax.checkpoint import Checkpoints
from mixer_jax.errors import UserError

STATISTICS = pretrained.Normalization((0.5, 0.4, 0.3), (0.2, 0.2, 0.3))


@pytest.fixture
def weights(tiny_config, tmp_path):
  """A file of random weights of the tiny model, with 7 classes and exact GELU."""
  run = experiment.build(tiny_config)
  shapes = run.param_shapes
  rng = np.random.default_rng(3)
  params = jax.tree.map(lambda x: rng.normal(0, 0.1, x.shape).astype(np.float32), shapes)
  params["head"] = {"kernel": np.ones((16, 7), np.float32), "bias": np.ones(7, np.float32)}
  model = run.task.model.clone(gelu="exact", layer_norm_epsilon=1e-5)
  pretrained.save(tmp_path / "w.npz", params, model, STATISTICS)
  return tmp_path / "w.npz", params


def fine_tuned(config, path):
  config.pretrained = str(path)
  config.num_epochs = 1
  config.data.update(mean=STATISTICS.mean, std=STATISTICS.std)
  return config


def test_starts_from_the_weights_with_a_fresh_head(tiny_config, weights, tmp_path):
  path, params = weights
  config = fine_tuned(tiny_config, path)
  config.optimizer = config_lib.optimizer("sgd", learning_rate=0.0)  # nothing moves
  directory = train.train(config, str(tmp_path / "run"))
  saved = Checkpoints(directory, read_only=True)
  ended = saved.restore_arrays(saved.latest())
  head = ended.pop("head")
  assert head["kernel"].shape == (16, 4) and not np.any(head["kernel"])
  params.pop("head")
  jax.tree.map(np.testing.assert_array_equal, ended, params)
  model = workdir.load_config(directory).model
  assert (model.gelu, model.layer_norm_epsilon) == ("exact", 1e-5)


def test_the_file_is_not_needed_again(tiny_config, weights, tmp_path):
  path, _ = weights
  config = fine_tuned(tiny_config, path)
  directory = train.train(config, str(tmp_path / "run"))
  path.unlink()
  train.train(config, str(directory))  # finished already
  metrics = evaluate.evaluate(str(directory), "latest")
  assert metrics["top1"] == workdir.read_metrics(directory)[-1]["test/top1"]
  with pytest.raises(UserError, match=r"w\.npz"):
    train.train(config, str(tmp_path / "another"))


def test_the_config_s_own_fields_win(tiny_config, weights, tmp_path):
  config = fine_tuned(tiny_config, weights[0])
  config.model.gelu = "tanh"
  directory = train.train(config, str(tmp_path / "run"))
  assert workdir.load_config(directory).model.gelu == "tanh"


def test_other_pixels_are_refused_unless_asked_for(tiny_config, weights, tmp_path):
  config = fine_tuned(tiny_config, weights[0])
  config.data.mean = (0.0, 0.0, 0.0)
  with pytest.raises(UserError, match="was trained with .0.5, 0.4, 0.3.*any_normalization"):
    train.train(config, str(tmp_path / "run"))
  assert not (tmp_path / "run").exists()
  config.any_normalization = True
  train.train(config, str(tmp_path / "run"))


def test_weights_of_another_model_are_refused_by_name(tiny_config, weights, tmp_path):
  config = fine_tuned(tiny_config, weights[0])
  config.model.channels_mlp_dim = 24
  with pytest.raises(UserError, match="channel_mixing/Dense_0/kernel"):
    train.train(config, str(tmp_path / "run"))


def test_a_larger_grid_takes_an_explicit_choice(tiny_config, weights, tmp_path):
  config = fine_tuned(tiny_config, weights[0])
  config.data.update(resize=16, image_size=16, pad=0)
  with pytest.raises(UserError, match="block_diagonal"):
    train.train(config, str(tmp_path / "run"))
  config.resize_tokens = "interpolate_bilinear"
  train.train(config, str(tmp_path / "interpolated"))
  # Copies on a diagonal of blocks need a token mixing K^2 = 4 times as wide.
  config.resize_tokens = "block_diagonal"
  config.model.tokens_mlp_dim = None
  directory = train.train(config, str(tmp_path / "blocks"))
  assert workdir.load_config(directory).model.tokens_mlp_dim == 4 * 8


def test_an_exported_run_is_a_file_to_start_from(tiny_config, tmp_path):
  tiny_config.num_epochs = 1
  tiny_config.model.gelu = "exact"
  first = train.train(tiny_config, str(tmp_path / "first"))
  file = export.export(str(first), "latest", str(tmp_path / "first.npz"))
  weights = pretrained.read(str(file))
  assert weights.fields["gelu"] == "exact"
  saved = Checkpoints(first, read_only=True)
  params = traverse_util.flatten_dict(saved.restore_arrays(saved.latest()), sep="/")
  assert params.keys() == weights.arrays.keys()
  jax.tree.map(np.testing.assert_array_equal, params, dict(weights.arrays))
  tiny_config.pretrained = str(file)
  tiny_config.optimizer = config_lib.optimizer("sgd", learning_rate=0.0)
  second = train.train(tiny_config, str(tmp_path / "second"))
  # Equal class counts keep the head, so the metrics are those of the first run.
  assert (
    evaluate.evaluate(str(second), "latest")["loss"]
    == evaluate.evaluate(str(first), "latest")["loss"]
  )
