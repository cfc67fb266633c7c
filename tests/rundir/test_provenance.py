"""The origin of a run: its sessions, and the commit of this package."""

import inspect
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixer_jax.data.dataset import Arrays, sample
from mixer_jax.errors import UserError
from mixer_jax.rundir import provenance


def test_sessions_of_a_run(tmp_path):
  devices_and_data = 2, {"name": "npz", "train": 256, "test": 90}
  with provenance.session(tmp_path, 0, *devices_and_data):
    (open_one,) = provenance.read(tmp_path)
    assert open_one["ended"] is None
  with pytest.raises(ValueError, match="no"), provenance.session(tmp_path, 16, *devices_and_data):
    raise ValueError("no")
  first, second = json.loads((tmp_path / "run.json").read_text())["sessions"]
  assert (first["from_step"], second["from_step"]) == (0, 16)
  assert first["started"] <= first["ended"] <= second["started"] <= second["ended"]
  assert first["data"] == {"name": "npz", "train": 256, "test": 90}
  assert first["device"]["platform"] == "cpu" and first["device"]["count"] == 2
  assert first["versions"]["jax"] == jax.__version__


def test_classes_in_another_order_are_refused(tmp_path):
  provenance.check_classes(tmp_path, ("cat", "dog"))  # nothing is recorded
  with provenance.session(tmp_path, 0, 1, {"train": 1}, ("cat", "dog")):
    provenance.check_classes(tmp_path, ["cat", "dog"])
    provenance.check_classes(tmp_path, ())
    for names, line in {
      ("a_dog", "cat"): "label 0 is 'cat' in .* and 'a_dog' in the data",
      ("cat", "cow"): "label 1 is 'dog' in .* and 'cow' in the data",
      ("cat", "dog", "eel"): "label 2 is None in .* and 'eel' in the data",
      ("cat",): "label 1 is 'dog' in .* and None in the data",
    }.items():
      with pytest.raises(UserError, match=line):
        provenance.check_classes(tmp_path, names)


@pytest.mark.parametrize("names", [np.array(["cat", "dog"]), np.arange(2), (0, 1)])
def test_names_of_classes_may_be_an_array_or_numbers(tmp_path, names):
  with provenance.session(tmp_path, 0, 1, {"train": 1}, names):
    assert provenance.class_names(tmp_path) == tuple(map(str, names))
    provenance.check_classes(tmp_path, names)
    with pytest.raises(UserError, match="label 0 is"):
      provenance.check_classes(tmp_path, names[::-1])


def test_notes_may_be_numbers_and_arrays_of_numpy(tmp_path):
  notes = {"train": np.int64(3), "scale": np.float32(0.5), "grids": jnp.array([64, 32])}
  with provenance.session(tmp_path, 0, 1, notes):
    assert provenance.notes(tmp_path) == {"train": 3, "scale": 0.5, "grids": [64, 32]}
    provenance.check_grids(tmp_path, notes)
    with pytest.raises(UserError, match=r"grids \[64, 32\] .* have \[64, 64\]"):
      provenance.check_grids(tmp_path, {"grids": np.array([64, 64])})
  with pytest.raises(TypeError, match="cannot be written as JSON"):
    with provenance.session(tmp_path, 0, 1, {"train": 3, "kinds": {1}}):
      pass
  assert len(provenance.read(tmp_path)) == 1


def git(path, *args):
  identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
  subprocess.run(["git", "-C", str(path), *identity, *args], check=True, capture_output=True)


def commit_of(root):
  """The commit that a copy of the function names in the package it was put into."""
  script = f"""
import sys, types
sys.path.insert(0, {str(root)!r})
import mixer_jax
names = dict(mixer_jax=mixer_jax)
exec("import pathlib, subprocess\\n" + {inspect.getsource(provenance.commit)!r}, names)
print(names["commit"]())
"""
  command = [sys.executable, "-I", "-c", script]
  result = subprocess.run(command, capture_output=True, text=True)
  assert result.returncode == 0, result.stderr
  return result.stdout.strip()


def test_the_commit_is_this_package_s(tmp_path):
  package = tmp_path / "mixer_jax"
  package.mkdir()
  (package / "__init__.py").write_text("")
  assert commit_of(tmp_path) == "None"  # no repository
  git(tmp_path, "init")
  assert commit_of(tmp_path) == "None"  # one of somebody else: the package is not in it
  git(tmp_path, "add", ".")
  git(tmp_path, "commit", "-m", "x")
  head = subprocess.run(
    ["git", "-C", str(tmp_path), "rev-parse", "HEAD"], capture_output=True, text=True
  ).stdout.strip()
  assert commit_of(tmp_path) == head[:12]
  (package / "__init__.py").write_text("changed = True\n")
  assert commit_of(tmp_path) == f"{head[:12]}-dirty"


def test_other_examples_of_the_same_number_and_shape_are_refused(tmp_path):
  rng = np.random.default_rng(0)
  images, labels = rng.integers(0, 256, (100, 4, 4, 3), np.uint8), np.arange(100) % 7
  split = lambda images: Arrays({"image": images, "label": labels})
  found = sample(split(images))
  rows = np.arange(8) * 100 // 8
  assert found["image"] == pytest.approx([images[rows].mean(), images[rows].std()])
  assert found["label"] == pytest.approx([labels[rows].mean(), labels[rows].std()])
  provenance.check_data(tmp_path, 100, found)  # nothing is recorded
  with provenance.session(tmp_path, 0, 1, {"train": 100, "sample": found}):
    close = np.clip(images.astype(int) + rng.integers(-1, 2, images.shape), 0, 255)
    provenance.check_data(tmp_path, 100, sample(split(close.astype(np.uint8))))
    line = r"was trained on other examples, with a mean image of 12\d.* in some, which is .*:"
    with pytest.raises(UserError, match=line):
      provenance.check_data(tmp_path, 100, sample(split(images[::-1] // 2)))
    with pytest.raises(UserError, match="was trained on 100 examples, and the training set has 99"):
      provenance.check_data(tmp_path, 99, found)
  provenance.check_data(tmp_path, 100)


def test_functions_on_other_grids_are_refused(tmp_path):
  notes = {"grids": ((64,), (64,))}
  provenance.check_grids(tmp_path, notes)  # nothing is recorded
  with provenance.session(tmp_path, 0, 1, {"train": 1} | notes):
    provenance.check_grids(tmp_path, notes)
    provenance.check_grids(tmp_path, {})
    line = r"trained on grids \[\[64\], \[64\]\] \(inputs, outputs\), and the data have \[\[128\], "
    with pytest.raises(UserError, match=line):
      provenance.check_grids(tmp_path, {"grids": ((128,), (64,))})
