"""Data that stand in for sets that are not here: a program depends on shapes alone."""

import json
from typing import Any, Mapping, NamedTuple

import ml_collections
import numpy as np

from mixer_jax import config as config_lib
from mixer_jax import experiment, tasks
from mixer_jax.data.dataset import Arrays, Dataset
from mixer_jax.experiment import Experiment
from mixer_jax.options import pair
from mixer_jax.tasks.images.image_task import ImageTask

_OWN = ("folder", "files", "npz")  # names of data that are where `data.dir` says
_HERE = ("sample", "shapes")
_SPLITS = {"train_split": "train", "test_split": "test", "validation_split": ""}
_SPLITS |= {"extra_test_splits": "", "test_sets": "", "test_labels": ""}
# By task the options of bundled or generated data; those that a task does not have are left out.
_IMAGES = {"name": "sample", "dir": "", **_SPLITS}
_TEXTS = {"name": "sample", "dir": "", "text": "sentence", "pair": "", **_SPLITS}
_MASKS = {"name": "shapes", "dir": "", "classes": "", "void": 255, **_SPLITS}
_FUNCTIONS = {"train_functions": 8, "test_functions": 2}
_DATA = {
  **dict.fromkeys(("text_classification", "translation", "masked_lm"), _TEXTS),
  "segmentation": _MASKS,
}
_TEACHER = dict(name="resnet_20", fields={}, image_size=32, mean=[0.5] * 3, std=[0.25] * 3)


class _Set(NamedTuple):
  """The published numbers of a set of images, and the side of its images if all have it."""

  train: int
  test: int
  classes: int
  side: int = 0


_SETS = {
  "cifar10": _Set(50_000, 10_000, 10, 32),
  "cifar100": _Set(50_000, 10_000, 100, 32),
  "imagenet2012": _Set(1_281_167, 50_000, 1000),
  "imagenet21k": _Set(14_197_122, 50_000, 21_841),
}


def build(
  config: ml_collections.ConfigDict, devices: Any = None, folder: str = ""
) -> tuple[Experiment, str]:
  """The experiment of a config, with its own data if they are here, and a line on those that are not.

  Args:
    config: of the run.
    devices: see `experiment.make`.
    folder: for generated functions; "": where the config has them.
  """
  given, config = config, config.copy_and_resolve_references()
  with config.unlocked():
    told = _replace(config, folder)
  config_lib.check(config)
  size = (
    _SETS.get(given.data.name) if told and issubclass(tasks.find(given.task), ImageTask) else None
  )
  datasets = lambda task: _blank(task, config, size) if size else task.datasets()
  if size:
    told = f"{told}; of its shapes: {size.train:,} training images, {size.classes:,} classes"
  return experiment.make(config, None, devices, datasets), told


def _replace(config: ml_collections.ConfigDict, folder: str) -> str:
  """Changes a config so that its data are here; the line says what."""
  config.require_accelerator = False
  if config.get("pretrained") == config_lib.REQUIRED:
    config.pretrained = ""
  if config.task == "distillation" and not config.distillation.get("described"):
    config.distillation.described = json.dumps(_TEACHER)
  data = config.get("data", {})
  if config.task == "operator_learning" and data.name != "npz":
    data.update(_FUNCTIONS, cache_dir=folder)
    return f"{data.name}: generated for {_FUNCTIONS['train_functions']} functions"
  name = data.get("name", _HERE[0])
  if name in _HERE or (name in _OWN and data.dir):
    return ""
  options = _DATA.get(config.task, _IMAGES)
  data.update({field: value for field, value in options.items() if field in data})
  return f"{name} is not read; {data.name!r} stands in"


def _blank(task: Any, config: ml_collections.ConfigDict, size: _Set) -> Mapping[str, Dataset]:
  """Black images of the published number, size and classes of a set, which take no memory."""
  task.class_names = tuple(map(str, range(size.classes)))
  data = config.data
  side = data.image_size if data.crop else data.stored_size or size.side or data.image_size
  black = lambda n: np.broadcast_to(np.uint8(0), (n, *pair(side), 3))
  labels = lambda n: np.arange(n, dtype=np.int32) % size.classes
  split = lambda n: Arrays({"image": black(n), "label": labels(n)})
  return {"train": split(size.train), "test": split(size.test)}
