"""Runs that start from other runs: all that is taken over, and all that is refused."""

import logging
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixer_jax import config as config_lib
from mixer_jax import evaluate, experiment, models, pretrained, tasks
from mixer_jax.errors import UserError
from mixer_jax.rundir import directory as directory_lib
from mixer_jax.tasks.images import start
from mixer_jax.training import loop, restore
from mixer_jax.training.checkpoint import Checkpoints


def tiny(path):
  """One block of width 8 on images of 8x8 in patches of 4."""
  config = config_lib.default()
  config.update(num_steps=2, batch_size=32, eval_batch_size=90)
  config.mesh.data = 1
  config.model = config_lib.model(
    "mixer_small", hidden_dim=8, num_blocks=1, tokens_mlp_dim=8, channels_mlp_dim=16, gelu="exact"
  )
  config.data = config_lib.data("npz", like="cifar10")
  config.data.update(dir=str(path), image_size=8, pad=0, flip=False)
  config.optimizer = config_lib.optimizer("adam", learning_rate=3e-2)
  return config


@pytest.fixture(scope="module")
def donor(shapes_npz, tmp_path_factory):
  """A run with averaged parameters, and the config of another that starts from it and stands."""
  config = tiny(shapes_npz)
  config.ema_decay = 0.9
  return loop.train(config, str(tmp_path_factory.mktemp("donor") / "run"))


@pytest.fixture
def config(donor, shapes_npz):
  config = tiny(shapes_npz)
  config.model = config_lib.model("mixer_small")
  config.update(pretrained=str(donor), num_steps=1)
  config.optimizer.learning_rate = 0.0
  return config


def start_of(config):
  """The parameters that a run of the config begins with."""
  config = tasks.find(config.task).complete(config)
  run = experiment.build(config)
  return run.task.initial(run.variable_shapes, restore.stored)["params"]


@pytest.mark.thorough
def test_the_same_classes_keep_the_averaged_parameters_and_the_head(donor, config):
  params = start_of(config)
  device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  _, kept = Checkpoints(donor, read_only=True).restore_variables("latest", device)
  jax.tree.map(np.testing.assert_array_equal, params, kept["average"])
  assert np.any(params["head"]["kernel"] != kept["params"]["head"]["kernel"])
  model = tasks.find(config.task).complete(config).model
  assert (model.hidden_dim, model.num_blocks, model.gelu, model.remat) == (8, 1, "exact", None)


@pytest.mark.thorough
def test_the_donor_s_file_may_be_gone_when_a_run_goes_on(donor, config, tmp_path):
  own = shutil.copytree(donor, tmp_path / "donor")
  config.update(pretrained=str(own), num_steps=2, checkpoint_steps=1, eval_steps=2)
  directory = loop.train(config, str(tmp_path / "run"))
  shutil.rmtree(directory / "checkpoints" / "2")
  shutil.rmtree(own)
  loop.train(config, str(directory))
  assert evaluate.evaluate(str(directory)) == evaluate.evaluate(str(donor))


@pytest.mark.parametrize("names", [list("abcd"), list("abc")])
@pytest.mark.first(1)
def test_other_classes_get_a_head_of_zeros_and_a_line(donor, config, tmp_path, caplog, names):
  arrays = dict(np.load(config.data.dir))
  arrays |= {k: np.minimum(x, len(names) - 1) for k, x in arrays.items() if "labels" in k}
  np.savez(tmp_path / "named.npz", class_names=names, **arrays)
  config.data.dir = str(tmp_path / "named.npz")
  with caplog.at_level(logging.INFO):
    params = start_of(config)
  assert params["head"]["kernel"].shape == (8, len(names)) and not np.any(params["head"]["kernel"])
  other = " other" * (len(names) == 4)
  assert f"has a head for 4{other} classes; fresh zero head for {len(names)}" in caplog.text


def test_a_file_of_other_patches_is_refused_before_the_images_are_read(config, tmp_path):
  model = models.build("mixer_small", 3, patch_size=2, hidden_dim=8, num_blocks=1)
  params = model.init(jax.random.key(0), jnp.zeros((1, 8, 8, 3)))["params"]
  pretrained.save(tmp_path / "two.npz", params, model)
  config.pretrained, config.model.patch_size = str(tmp_path / "two.npz"), 4
  with pytest.raises(UserError, match="two.npz has patches of 2x2 pixels, the model of 4x4"):
    tasks.find(config.task).complete(config)


@pytest.mark.thorough
def test_another_resolution_takes_a_choice(config):
  config.data.image_size = config.data.resize = 16
  with pytest.raises(UserError, match="grid.*set resize_tokens to block_diagonal"):
    tasks.find(config.task).complete(config)  # before the images are read
  config.resize_tokens = "interpolate_bilinear"
  assert start_of(config)["MixerBlock_0"]["token_mixing"]["Dense_0"]["kernel"].shape == (16, 8)
  config.resize_tokens = "block_diagonal"
  assert start_of(config)["MixerBlock_0"]["token_mixing"]["Dense_0"]["kernel"].shape == (16, 32)


@pytest.mark.thorough
def test_scanned_blocks_start_from_those_of_a_run_apart(config):
  apart = start_of(config)["MixerBlock_0"]
  config.model.scan_blocks = True
  stacked = start_of(config)["MixerBlocks"]
  jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y[None]), stacked, apart)


@pytest.mark.thorough
def test_a_run_of_dino_gives_its_teacher_and_the_head_is_fresh(shapes_npz, tmp_path):
  dino = config_lib.default("self_distillation", "mixer_small")
  dino.model, dino.data.image_size = tiny(shapes_npz).model, 8
  dino.dino.update(out_dim=8, hidden_dim=4, bottleneck_dim=4)
  dino = tasks.find(dino.task).complete(dino)
  (tmp_path / directory_lib.CONFIG).write_text(dino.to_json())
  variables = jax.device_get(tasks.find("self_distillation")(dino).init(jax.random.key(1)))
  variables["params"] = jax.tree.map(np.zeros_like, variables["params"])  # the student's
  config = tiny(shapes_npz)
  config.pretrained = str(tmp_path)
  run = experiment.build(tasks.find(config.task).complete(config))
  found = run.task.initial(run.variable_shapes, lambda path: (dino, variables))["params"]
  assert not np.any(found.pop("head")["kernel"])
  jax.tree.map(np.testing.assert_array_equal, found, variables["teacher"]["backbone"])


MISTAKES = {
  "patch": (dict(model=dict(patch_size=2)), "model.patch_size is 2, but '.*run' has 4; leave it"),
  "width": (dict(model=dict(hidden_dim=9)), "model.hidden_dim is 9, but '.*' has 8"),
  "mixing": (
    dict(model=dict(token_mixer="galerkin")),
    "model.token_mixer is 'galerkin', but '.*' has 'mlp'; leave it",
  ),
  "name": (dict(model=dict(name="mixer_b4")), "model.name is 'mixer_b4', but .* a mixer_small"),
  "pixels": (dict(data=dict(mean=(0.0, 0.0, 0.0))), "was trained with .*any_normalization"),
}


@pytest.mark.parametrize("changes,message", MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_one_line(config, changes, message):
  config.update(changes)
  with pytest.raises(UserError, match=message):
    tasks.find(config.task).complete(config)


def test_directories_without_a_run_on_images_are_refused(config, tmp_path):
  with pytest.raises(UserError, match="holds no run"):
    start.describe(str(tmp_path))
  other = '{"task": "translation", "model": {"name": "x"}, "data": {}}'
  (tmp_path / directory_lib.CONFIG).write_text(other)
  with pytest.raises(UserError, match="has no model of images"):
    start.describe(str(tmp_path))
  (tmp_path / directory_lib.CONFIG).write_text('{"architecture": "mixer_b16_224"}')
  (tmp_path / "model.safetensors").touch()
  with pytest.raises(UserError, match="take '.*/model.safetensors'"):
    start.describe(str(tmp_path))


def test_a_run_without_names_of_classes_is_told_by_their_number(donor, config, tmp_path):
  own = shutil.copytree(donor, tmp_path / "donor")
  assert start.describe(str(own)).class_names == tuple("0123")
  (own / "run.json").unlink()
  assert start.describe(str(own)).class_names == ()
  config.pretrained = str(own)
  assert np.any(start_of(config)["head"]["kernel"])
