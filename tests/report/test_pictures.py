"""The commands that draw pictures of a task, of a config's training images and of weights."""

import types

import numpy as np
import pytest

from mixer_jax import config as config_lib
from mixer_jax.errors import UserError
from mixer_jax.report import __main__ as command
from mixer_jax.report import figures
from mixer_jax.training.restore import Restored
from tests.study.grid import Errors, errors


class Drawing(Errors):
  def pictures(self, variables, split):
    figure, [[axis]] = figures.panels(1, 1, (2, 2))
    axis.plot(split)
    return {"line": figure, variables["params"]: figures.panels(1, 1, (2, 2))[0]}


@pytest.fixture
def flags(tmp_path, monkeypatch):
  """The flags of the command; pictures go to a new directory."""
  given = dict(workdir=None, config=None, pretrained=None, checkpoint="latest", data_dir=None)
  given |= dict(split="test", out=tmp_path / "new")
  monkeypatch.setattr(command, "_FLAGS", found := types.SimpleNamespace(**given))
  monkeypatch.setattr(command, "_workdir", lambda: tmp_path)
  return found


def test_each_picture_of_a_task_is_a_file_of_its_name(flags, tmp_path, monkeypatch, capsys):
  run = types.SimpleNamespace(task=Drawing(), datasets={"test": [1, 2]})
  monkeypatch.setattr(
    command.restore, "restore", lambda *_: Restored(run, {"params": "weights"}, 3)
  )
  flags.split = "dev"
  with pytest.raises(UserError, match="--split is 'dev'; allowed: test"):
    command._pictures([])
  flags.split = "test"
  command._pictures([])
  paths = [tmp_path / "new" / name for name in ("line.png", "weights.png")]
  assert capsys.readouterr().out == "".join(f"{path}\n" for path in paths)
  assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
  run.task = Errors()
  with pytest.raises(UserError, match="task Errors has no pictures"):
    command._pictures([])


def test_augmented_images_of_a_config_are_drawn_without_a_run(flags, tmp_path, capsys, tiny_config):
  flags.config = tiny_config
  tiny_config.augment.mixup = 0.8
  command._augment([])
  path = tmp_path / "new" / "augmented.png"
  assert capsys.readouterr().out == f"{path}\n"
  assert path.read_bytes().startswith(b"\x89PNG")
  for config, named in (
    (config_lib.default("docs.own_task:Derivative"), "task Derivative"),
    (None, "--config"),
  ):
    flags.config = config
    with pytest.raises(UserError, match=named):
      command._augment([])


@pytest.mark.parametrize(
  "params, config",
  [
    ({"embedding": np.ones(3)}, config_lib.default()),
    ({"stem": {"kernel": np.ones((4, 4))}}, config_lib.default()),
    ({"stem": {"kernel": np.ones((4, 4, 3, 2))}}, errors("sgd")),  # patches of no image
  ],
)
def test_a_model_without_patches_of_images_is_refused(params, config, flags, tmp_path, monkeypatch):
  flags.workdir = str(tmp_path)
  (tmp_path / "config.json").write_text(config.to_json())
  task = types.SimpleNamespace(backbone=lambda variables: variables["teacher"])
  variables = {"params": {"head": np.ones(3)}, "teacher": params}
  monkeypatch.setattr(command.restore, "load_run", lambda *_: (task, variables))
  with pytest.raises(UserError, match="'stem'"):
    command._weights([])
