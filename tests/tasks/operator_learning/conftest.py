"""Files of functions, and a small operator that learns from them."""

import numpy as np
import pytest

from mixer_jax import config as config_lib
from tests.tasks.operator_learning.functions_on_a_circle import waves


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp("functions")
  for name, seed, number in (("train", 0, 64), ("test", 1, 21)):
    a, u = waves(seed, number, 64)
    np.savez(path / f"{name}.npz", a=a, u=u)
    coeff = np.broadcast_to(np.where(a > 0, 12, 3)[:, :17, None], (number, 17, 17))
    sol = np.broadcast_to(u[:, None, :17], (number, 17, 17))
    np.savez(path / f"{name}_2d.npz", coeff=np.float32(coeff), sol=np.float32(sol))
  u[3] = 0
  np.savez(path / "rest.npz", a=a, u=u)
  return path


@pytest.fixture
def config(folder):
  config = config_lib.default("operator_learning", "fno_1d")
  config.update(batch_size=8, eval_batch_size=8, num_epochs=2, h1=0.1)
  config.mesh.data = 1
  config.model.update(hidden_dim=8, modes=4, num_blocks=2, mlp_dim=8)
  config.data.update(name="files", dir=str(folder), train_split="train.npz", step=2)
  config.data.update(test_split="test.npz")
  config.optimizer = config_lib.optimizer("adam", 1e-2)
  return config
