"""Runs that start from weights: what they take over, and what they do not need."""

import shutil

import jax
import numpy as np
import pytest

from mixer_jax import config as config_lib
from mixer_jax import evaluate, experiment, export, pretrained, tasks
from mixer_jax.errors import UserError
from mixer_jax.rundir import metrics_file
from mixer_jax.training import loop, restore

STATISTICS = pretrained.Normalization((0.5, 0.4, 0.3), (0.2, 0.2, 0.3))


@pytest.fixture
def config(tiny_config, tmp_path):
  """A run of one step that starts from the file w.npz, and does not move."""
  tiny_config.num_steps, tiny_config.model.num_blocks = 1, 1
  tiny_config.optimizer = config_lib.optimizer("sgd", learning_rate=0.0)
  tiny_config.pretrained = str(tmp_path / "w.npz")
  tiny_config.data.update(mean=STATISTICS.mean, std=STATISTICS.std)
  return tiny_config


@pytest.fixture
def weights(config, tmp_path):
  """The file of random weights of the tiny model, with 7 classes and exact GELU."""
  run = experiment.build(config)
  rng = np.random.default_rng(3)
  shapes = run.variable_shapes["params"]
  params = jax.tree.map(lambda x: rng.normal(0, 0.1, x.shape).astype(np.float32), shapes)
  params["head"] = {"kernel": np.ones((16, 7), np.float32), "bias": np.ones(7, np.float32)}
  model = run.task.model.clone(gelu="exact", layer_norm_epsilon=1e-5)
  pretrained.save(tmp_path / "w.npz", params, model, STATISTICS)
  return params


def test_evaluations_start_from_the_weights_as_train_does(config, weights):
  [(state, _)] = loop.evaluations(experiment.build(tasks.find(config.task).complete(config)))
  ended = dict(state.params)
  assert not np.any(ended.pop("head")["kernel"])
  weights.pop("head")
  jax.tree.map(np.testing.assert_array_equal, ended, weights)


@pytest.mark.thorough
def test_starts_from_the_weights_with_a_fresh_head_and_does_not_need_them_again(
  config, weights, tmp_path
):
  directory = loop.train(config, str(tmp_path / "run"))
  _, variables = restore.load_run(str(directory))
  ended, params = dict(variables["params"]), dict(weights)
  head = ended.pop("head")
  assert head["kernel"].shape == (16, 4) and not np.any(head["kernel"])
  params.pop("head")
  jax.tree.map(np.testing.assert_array_equal, ended, params)
  model = config_lib.of_run(directory).model
  assert (model.gelu, model.layer_norm_epsilon) == ("exact", 1e-5)

  (tmp_path / "w.npz").unlink()
  loop.train(config, str(directory))  # finished already
  found = evaluate.evaluate(str(directory))["test"]["top1"]
  assert found == metrics_file.read(directory)[-1]["test/top1"]
  with pytest.raises(UserError, match=r"w\.npz"):
    loop.train(config, str(tmp_path / "another"))


def test_the_config_s_own_fields_win(config, weights):
  config.model.gelu = "tanh"
  assert experiment.tasks.find(config.task).complete(config).model.gelu == "tanh"


def test_other_pixels_are_refused_unless_asked_for(config, weights, tmp_path):
  config.data.mean = (0.0, 0.0, 0.0)
  with pytest.raises(UserError, match="was trained with .0.5, 0.4, 0.3.*any_normalization"):
    loop.train(config, str(tmp_path / "run"))
  assert not (tmp_path / "run").exists()
  config.any_normalization = True
  experiment.tasks.find(config.task).complete(config)


def test_weights_of_another_model_are_refused_by_name(config, weights, tmp_path):
  config.model.channels_mlp_dim = 24
  with pytest.raises(UserError, match="channel_mixing/Dense_0/kernel"):
    loop.train(config, str(tmp_path / "run"))


@pytest.mark.thorough
def test_a_larger_grid_takes_an_explicit_choice(config, weights, tmp_path):
  config.data.update(resize=16, image_size=16, pad=0)
  with pytest.raises(UserError, match="block_diagonal"):
    loop.train(config, str(tmp_path / "run"))
  config.resize_tokens = "interpolate_bilinear"
  complete = experiment.tasks.find(config.task).complete
  run = experiment.build(complete(config))
  assert run.task.initial(run.variable_shapes, None) is not None
  # Copies on a diagonal of blocks need a token mixing K^2 = 4 times as wide.
  config.resize_tokens = "block_diagonal"
  config.model.tokens_mlp_dim = None
  directory = loop.train(config, str(tmp_path / "blocks"))
  assert config_lib.of_run(directory).model.tokens_mlp_dim == 4 * 8
  loop.train(config, str(tmp_path / "blocks"))  # resumed with the fields that were filled in


@pytest.mark.thorough
def test_a_run_goes_on_without_the_run_that_it_started_from(tiny_config, tmp_path):
  """Its patches, which the first run fixed and the model's own do not divide, are known by then."""
  tiny_config.num_epochs, tiny_config.model.patch_size = 1, 2
  tiny_config.data.update(resize=6, image_size=6)
  donor = loop.train(tiny_config, str(tmp_path / "donor"))
  tiny_config.pretrained, tiny_config.model.patch_size = str(donor), None
  directory = loop.train(tiny_config, str(tmp_path / "run"))
  shutil.rmtree(donor)
  assert loop.train(tiny_config, str(directory)) == directory


@pytest.mark.thorough
def test_an_exported_run_is_a_file_to_start_from(config, tmp_path):
  config.pretrained, config.model.gelu, config.model.num_blocks = "", "exact", 1
  config.optimizer.learning_rate = 0.1
  first = loop.train(config, str(tmp_path / "first"))
  file = export.export(str(first), "latest", str(tmp_path / "w.npz"))
  weights = pretrained.read(str(file))
  assert weights.fields["gelu"] == "exact"
  _, variables = restore.load_run(str(first))
  named = {jax.tree_util.keystr(k, simple=True, separator="/"): x
           for k, x in jax.tree_util.tree_leaves_with_path(variables["params"])}  # fmt: skip
  assert named.keys() == weights.arrays.keys()
  jax.tree.map(np.testing.assert_array_equal, named, dict(weights.arrays))
  config.pretrained, config.optimizer.learning_rate = str(file), 0.0
  second = loop.train(config, str(tmp_path / "second"))
  # Equal class counts keep the head, so the metrics are those of the first run.
  assert evaluate.evaluate(str(second)) == evaluate.evaluate(str(first))
