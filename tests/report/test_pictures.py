"""The pictures of a task; the report knows nothing of it."""

import types

import numpy as np
import pytest

from mixer_jax import config as config_lib
from mixer_jax.errors import UserError
from mixer_jax.report import __main__ as command
from mixer_jax.report import figures
from mixer_jax.tasks import panels
from mixer_jax.training.restore import Restored
from tests.study.grid import Errors


class Drawing(Errors):
  def pictures(self, variables, split):
    figure, [[axis]] = figures.panels(1, 1, (2, 2))
    axis.plot(split)
    return {"line": figure, variables["params"]: figures.panels(1, 1, (2, 2))[0]}


@pytest.fixture
def draw(tmp_path, monkeypatch):
  """Calls the command for a run of a task; its pictures go to a new directory."""

  def call(task, split):
    run = types.SimpleNamespace(task=task, datasets={"test": [1, 2]})
    options = dict(checkpoint="latest", data_dir=None, out=tmp_path / "new", split=split)
    monkeypatch.setattr(command, "_workdir", lambda: tmp_path)
    monkeypatch.setattr(command, "_FLAGS", types.SimpleNamespace(**options))
    restored = Restored(run, {"params": "weights"}, 3)
    monkeypatch.setattr(command.restore, "restore", lambda *_: restored)
    command._pictures([])

  return call


def test_each_is_a_file_of_its_name(draw, tmp_path, capsys):
  draw(Drawing(), "test")
  paths = [tmp_path / "new" / name for name in ("line.png", "weights.png")]
  assert capsys.readouterr().out == "".join(f"{path}\n" for path in paths)
  assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_mistakes_are_named(draw, tmp_path):
  with pytest.raises(UserError, match="--split is 'dev'; allowed: test"):
    draw(Drawing(), "dev")
  with pytest.raises(UserError, match="task Errors has no pictures"):
    draw(Errors(), "test")
  assert not (tmp_path / "new").exists()


@pytest.mark.thorough
def test_augmented_images_of_a_config_are_drawn_without_a_run(
  tmp_path, monkeypatch, capsys, tiny_config
):
  tiny_config.augment.mixup = 0.8
  options = dict(workdir=None, data_dir=None, config=tiny_config, out=tmp_path / "new")
  monkeypatch.setattr(command, "_FLAGS", types.SimpleNamespace(**options))
  command._augment([])
  path = tmp_path / "new" / "augmented.png"
  assert capsys.readouterr().out == f"{path}\n"
  assert path.read_bytes().startswith(b"\x89PNG")
  options["config"] = config_lib.default("docs.own_task:Derivative")
  monkeypatch.setattr(command, "_FLAGS", types.SimpleNamespace(**options))
  with pytest.raises(UserError, match="task Derivative has no pictures"):
    command._augment([])
  options["config"] = None
  monkeypatch.setattr(command, "_FLAGS", types.SimpleNamespace(**options))
  with pytest.raises(UserError, match="either --workdir=DIR of a run or --config=FILE"):
    command._augment([])


def test_names_that_are_no_utf_8_are_drawn(tmp_path):
  """A folder of an old archive, as Python reads its name."""
  name = b"caf\xe9 $x$".decode(errors="surrogateescape")
  figure = panels.confusion(np.eye(2), [name, "b"])
  figure.savefig(tmp_path / "a.png")
  assert panels.plain(name) == r"caf? \$x\$"
