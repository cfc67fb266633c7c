"""The settings of configs as tables."""

import pytest

from mixer_jax import config as config_lib
from mixer_jax.errors import UserError
from mixer_jax.report import settings


def test_a_config_s_own_settings_stand_before_the_table():
  config = config_lib.default("operator_learning", "fno_1d")
  config.data.update(name="burgers", step=16)
  config.batch_size, config.freeze = 8, "^stem/|^head/"
  config.optimizer = config_lib.optimizer("adam", 1e-3)
  rows = settings.of_one(config).splitlines()
  assert rows[4:6] == ["| `batch_size` | `8` |", "| `data.step` | `16` |"]
  assert r"| `freeze` | `'^stem/\|^head/'` |" in rows
  assert {"| `optimizer.name` | `'adam'` |", "| `optimizer.learning_rate` | `0.001` |"} <= {
    *rows[6:]
  }


def test_a_folder_s_configs_are_rows(tmp_path):
  (tmp_path / "mine.py").write_text(
    "from mixer_jax import config as config_lib\n\n"
    "def get_config():\n"
    "  config = config_lib.default('masked_lm', 'gmlp_text_small')\n"
    "  config.update(num_steps=1200, batch_size=48, seed=3)\n"
    "  config.model.num_blocks = 2\n"
    "  config.optimizer = config_lib.optimizer('sgd', 0.25, clip_norm=1.0)\n"
    "  return config\n"
  )
  row = settings.of_all(tmp_path).splitlines()[2]
  assert row == (
    "| `mine.py` | masked_lm | **gmlp_text_small**: num_blocks=2 | **sample** |"
    " **sgd**: clip_norm=1, learning_rate=0.25 | **constant** | 48 | 1,200 steps | seed=3 |"
  )
  with pytest.raises(UserError, match="--folder is '.*none', which has no config"):
    settings.of_all(tmp_path / "none")
