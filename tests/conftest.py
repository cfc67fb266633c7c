"""Small things that the tests share."""

from tests import environment  # noqa: F401, isort: skip (before JAX is imported)

import collections
import gc

import numpy as np
import pytest

from mixer_jax import config as config_lib
from mixer_jax.runtime import precision

# They start first: at the end one process would wait long for the other.
LONGEST = (
  "tests/runtime/test_processes.py",
  "tests/test_own_task.py",
  "tests/training/test_train.py",
  "tests/tasks/autoencoding/test_autoencoding.py",
  "tests/training/test_checkpoint.py",
  "tests/training/test_stops.py",
  "tests/docs/test_commands.py",
)


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(items):
  items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))
  cases = collections.Counter()
  for item in items:
    if first := item.get_closest_marker("first"):
      test = item.nodeid.partition("[")[0]
      cases[test] += 1
      if cases[test] > first.args[0]:
        item.add_marker("thorough")


def pytest_collection_finish():
  """Modules live as long as the process: collections of garbage need not look through them."""
  gc.collect()
  gc.freeze()
  gc.set_threshold(10_000, 20, 20)


@pytest.fixture(autouse=True)
def narrow_again():
  """A run in float64 is over with its test."""
  yield
  precision.take({})


@pytest.fixture(scope="session")
def shapes_npz(tmp_path_factory):
  """A set that a small net can learn: a bright 4x4 square in one of 4 corners."""
  rng = np.random.default_rng(0)
  arrays = {}
  for split, n in (("train", 256), ("test", 90)):
    images = rng.integers(0, 60, (n, 8, 8, 3), dtype=np.uint8)
    labels = np.arange(n, dtype=np.int32) % 4
    for image, label in zip(images, labels):
      row, column = 4 * (label // 2), 4 * (label % 2)
      image[row : row + 4, column : column + 4] += 150
    arrays |= {f"{split}_images": images, f"{split}_labels": labels}
  path = tmp_path_factory.mktemp("shapes") / "shapes.npz"
  np.savez(path, **arrays)
  return path


@pytest.fixture
def tiny_config(shapes_npz):
  """A run of seconds: 2 epochs of a 2-block Mixer on 8x8 images, one device."""
  config = config_lib.default()
  config.num_epochs = 2
  config.batch_size = 32
  config.eval_batch_size = 32
  config.mesh.data = 1
  config.model = config_lib.model(
    "mixer_small", hidden_dim=16, num_blocks=2, tokens_mlp_dim=8, channels_mlp_dim=32
  )
  config.data = config_lib.data("npz", like="cifar10")
  config.data.update(dir=str(shapes_npz), image_size=8, pad=1, flip=False)
  config.optimizer = config_lib.optimizer("adam", learning_rate=3e-3)
  return config


def waves(optimizer="sgd", **values):
  """The quickest run: 2 epochs of 8 steps of the task of docs/own_task.py, one device."""
  config = config_lib.default("docs.own_task:Derivative")
  config.num_epochs, config.batch_size, config.eval_batch_size = 2, 32, 64
  config.mesh.data = 1
  config.model.width = 16
  config.data.update(points=8, examples=256)
  config.optimizer = optimizer_of(optimizer)
  config.update_from_flattened_dict(values)
  return config


OPTIMIZERS = {
  "sgd": dict(learning_rate=0.1),
  # A large eps, or it scales up gradients of rounding errors.
  "adam": dict(learning_rate=1e-2, eps=1e-2),
  "kfac": dict(learning_rate=0.05, factor_period=2, inverse_period=4, factor_decay=0.5),
  "kfac_adam": dict(learning_rate=1e-2, eps=1e-2, factor_period=2, basis_period=4),
  "kfac_muon": dict(learning_rate=2e-2, factor_period=2, basis_period=4),
  "soap": dict(learning_rate=2e-2, eps=1e-2, basis_period=4),
  "shampoo": dict(learning_rate=1e-2, eps=1e-2, basis_period=4, corrected=True),
}


def optimizer_of(name):
  """The optimizer part of a config: one of `OPTIMIZERS`, or "graft" of SGD and K-FAC."""
  if name == "graft":
    return config_lib.grafted(optimizer_of("sgd"), optimizer_of("kfac"))
  return config_lib.optimizer(name, **OPTIMIZERS[name])
