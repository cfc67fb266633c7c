"""A training step of every config, at its own batch, is traced for one device."""

import functools
import json
import pathlib

import jax
import pytest

from mixer_jax import config as config_lib
from mixer_jax import experiment
from mixer_jax.study import plan
from mixer_jax.training import step as step_lib
from mixer_jax.training.state import state_shapes

FOLDER = pathlib.Path(__file__).parent.parent / "configs"
# Bundled or generated data in the place of sets that are downloaded, at the config's own sizes.
IMAGES = {"data.name": "sample", "data.train_split": "train", "data.test_split": "test"}
SHAPES = {
  **{"data.name": "shapes", "data.classes": "", "data.void": 255},
  **{"data.train_split": "train", "data.validation_split": "", "data.test_split": "test"},
}
FUNCTIONS = {"data.train_functions": 8, "data.test_functions": 2}
TEACHER = dict(name="resnet_20", fields={}, image_size=32, mean=[0.5] * 3, std=[0.25] * 3)
STAND_INS = {
  "ade20k": SHAPES,
  "camvid": SHAPES,
  **{name: FUNCTIONS for name in ("burgers", "darcy", "darcy_inverse")},
  "mnli": {
    **{"data.name": "sample", "data.text": "sentence", "data.pair": ""},
    **{"data.train_split": "train", "data.test_split": "test", "data.extra_test_splits": ""},
  },
  "distill_cifar": {"distillation.described": json.dumps(TEACHER)},
} | {
  name: IMAGES
  for name in (
    *("adam_cifar10", "adam_cifar100", "sgd_cifar10", "sgd_cifar100", "kfac_cifar10"),
    *("kfac_cifar100", "graft_cifar10", "dino_resmlp", "resmlp_imagenet", "transfer"),
  )
}
QUICK = "multi30k", "sst2", "resnet_cifar"


@pytest.mark.parametrize(
  "name", sorted((p.stem for p in FOLDER.glob("*.py")), key=lambda n: (n not in QUICK, n))
)
@pytest.mark.first(len(QUICK))
def test_a_step_is_traced(name, tmp_path):
  config = plan.read_config(FOLDER / f"{name}.py")
  with config.unlocked():
    config.update_from_flattened_dict(STAND_INS.get(name, {}))
  if config.task == "operator_learning":
    config.data.cache_dir = str(tmp_path)
  config.mesh.data, config.require_accelerator = 1, False
  if config.get("pretrained") == config_lib.REQUIRED:
    config.pretrained = ""
  run = experiment.build(config)
  state = state_shapes(run)
  update = functools.partial(step_lib.update, run)
  new, _ = jax.eval_shape(update, state, run.batch_shapes, run.numbers)
  specs = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
  assert specs(new) == specs(state)
