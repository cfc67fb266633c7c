"""Files that a process reads twice, and what it remembers of them."""

import os
import pathlib

import jax
import numpy as np
import pytest

from mixer_jax import models, pretrained
from mixer_jax.errors import reason
from mixer_jax.paths import remembered, shipped
from mixer_jax.tasks.distillation import teacher
from mixer_jax.tasks.images import start
from mixer_jax.text import text_data
from mixer_jax.text.vocabulary import SPECIAL, Vocabulary


def test_a_file_is_read_once_and_again_when_it_has_changed(tmp_path):
  path, reads = tmp_path / "a.txt", []
  read = remembered(lambda kind, path: reads.append(kind) or path.read_text(), number=2)
  path.write_text("old")
  assert [read("x", path), read("y", path), read("x", path)] == ["old"] * 3 and reads == ["x", "y"]
  time = path.stat().st_mtime_ns
  path.write_text("new")  # of the same size, and a clock may be coarse
  os.utime(path, ns=(time + 1, time + 1))
  assert read("x", path) == "new"
  read.forget()
  assert read("x", path) == "new" and len(reads) == 4


def test_another_library_s_message_is_cut_where_all_see_it():
  assert reason(ValueError("a\nb")) == "a b"
  assert reason(ValueError("x" * 301)) == "x" * 300 + "..."


def test_an_address_is_read_once():
  reads = []
  read = remembered(lambda path: reads.append(path))
  read("https://example.org/w.npz"), read("https://example.org/w.npz")
  assert len(reads) == 1


def test_a_vocabulary_that_was_written_anew_is_read_anew(tmp_path):
  path = str(tmp_path / "v.txt")
  for words in (["cat", "dog"], ["dog", "cat", "cow"]):
    Vocabulary([*SPECIAL, *words]).save(path)
    assert text_data.vocabulary(Vocabulary, path).words[5:] == words


@pytest.mark.parametrize("read", [start.describe, teacher._weights])
def test_weights_that_were_written_anew_are_read_anew(read, tmp_path):
  model = models.build("mixer_small", num_classes=2, num_blocks=1, hidden_dim=8)
  params = model.init(jax.random.key(0), np.zeros((1, 32, 32, 3)))["params"]
  path = tmp_path / "w.npz"
  for bias in (0.0, 1.0):
    params["head"]["bias"] = np.full(2, bias, np.float32)
    pretrained.save(path, params, model)
    assert read(str(path)).arrays["head/bias"].tolist() == [bias] * 2


def test_configs_of_the_package_are_found_by_name_in_any_folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  found = shipped("--config=configs/quickstart.py:kfac")
  path = found.removeprefix("--config=").removesuffix(":kfac")
  assert "def get_config" in pathlib.Path(path).read_text()
  assert pathlib.Path(shipped("configs/studies/small.py")).is_absolute()
  for other in ("--config=configs/none.py", "--config.data.dir=configs/quickstart.py", "x"):
    assert shipped(other) == other
  (tmp_path / "configs").mkdir()
  (tmp_path / "configs/quickstart.py").touch()
  assert shipped("--config=configs/quickstart.py") == "--config=configs/quickstart.py"
