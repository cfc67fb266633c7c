"""The commands of the documents, run as they stand but shorter: `pytest -m slow tests/docs`.

`python` is a wrapper that appends the options of `SHORTER`; `pip` does nothing, since `.ci/run`
installs from nothing by the README's own line. Marked blocks (see `commands`) take more time, a
network or a GPU, and are left out.
"""

import os
import shutil
import subprocess
import sys

import jax
import numpy as np
from PIL import Image
import pytest
import scipy.io

from mixer_jax import models, pretrained
from mixer_jax.rundir import metrics_file
from mixer_jax.text import sample
from mixer_jax.text.records import rows
from tests.docs.commands import PAGES, ROOT, blocks, snippets

pytestmark = pytest.mark.slow

SHORTER = {
  "mixer_jax.main": [
    "--config.num_steps=4",
    "--config.eval_steps=2",
    "--config.checkpoint_steps=2",
    "--config.schedule.warmup_epochs=0",
    "--config.schedule.warmup_steps=0",
  ],
  "benchmarks": ["--steps=4"],
}
# Runs that a page's commands start from.
BEFORE = (
  "python -m mixer_jax.main --config=configs/quickstart.py --workdir=DIR",
  "python -m mixer_jax.main --config=configs/resmlp_cifar.py --workdir=runs/donor --config.data.name=sample",
  "python -m mixer_jax.main --config=configs/quickstart.py --workdir=runs/s12"
  " --config.data.name=folder --config.data.dir=FOLDER --config.data.test_sets=v2=FOLDER/test",
)
_PYTHON = f"""#!{sys.executable}
import os, sys
words = sys.argv[1:]
words += {SHORTER!r}.get(words[1] if words[0] == "-m" else "", [])
os.execv({sys.executable!r}, [{sys.executable!r}, *words])
"""


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
  """Runs commands in a place like the repository, with data and runs by the names of the pages."""
  directory = tmp_path_factory.mktemp("repository")
  for path in ROOT.iterdir():
    if path.name not in ("runs", ".git"):
      (directory / path.name).symlink_to(path)
  programs = tmp_path_factory.mktemp("programs")
  for name, text in {"python": _PYTHON, "pip": "#!/bin/sh\n"}.items():
    (programs / name).write_text(text)
    (programs / name).chmod(0o755)
  kept = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
  paths = {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}

  def run(text):
    command = ["bash", "-euo", "pipefail", "-c", text]
    return subprocess.run(
      command, cwd=directory, env=kept | paths, capture_output=True, text=True, timeout=900
    )

  _write_folder(directory / "FOLDER")
  for name in ("cat.jpg", "street.png"):
    shutil.copy(directory / "FOLDER" / "test" / "dark" / "0.png", directory / name)
  _write_texts(directory / "texts")
  _write_pairs(directory / "pairs")
  functions = np.random.default_rng(0).normal(size=(1124, 512)).cumsum(axis=1)
  functions = functions.astype(np.float32)
  np.savez(directory / "functions.npz", a=functions[:2])
  for command in BEFORE:
    made = run(command)
    assert made.returncode == 0, made.stderr
  scipy.io.savemat(directory / "DIR" / "all.mat", {"a": functions, "u": functions})
  shutil.copytree(directory / "runs" / "s12", directory / "runs" / "s24")
  run.directory = directory
  return run


def _write_folder(folder):
  """Two classes of flat colours, dark and bright."""
  rng = np.random.default_rng(0)
  for split, number in (("train", 800), ("test", 50)):
    for name, level in (("dark", 60), ("bright", 200)):
      (folder / split / name).mkdir(parents=True)
      for i in range(number):
        pixels = rng.integers(level - 40, level + 40, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / split / name / f"{i}.png")


def _write_texts(folder):
  """The sentences of the bundled sample."""
  folder.mkdir()
  for split, name in (("train", "train.txt"), ("dev", "valid.txt")):
    (folder / name).write_text("\n".join(rows(str(sample.SPLITS[split]), sample.TEXT).texts))


def _write_pairs(folder):
  """Pairs of sentences with three labels."""
  folder.mkdir()
  lines = [f"a man {v}\tnobody {v}\t{label}" for v in ("sings", "runs") for label in "abc"]
  for split in ("train", "test"):
    table = "\n".join(["sentence_A\tsentence_B\tjudgment", *lines * 40])
    (folder / f"{split}.tsv").write_text(table)


READY = [block for page in PAGES for block in blocks(page) if not block.needs]


@pytest.mark.parametrize("block", READY, ids=[f"{b.page}-{i}" for i, b in enumerate(READY)])
def test_a_block_runs(block, shell):
  result = shell(block.text)
  assert result.returncode == 0, result.stderr[-2000:]


def test_the_commands_on_a_run_leave_what_the_page_says(shell):
  """Metrics, curves, pictures, predictions, and weights that fit the model."""
  block = next(b for b in blocks("docs/running.md") if "predict" in b.text)
  result = shell(block.text)
  assert result.returncode == 0, result.stderr[-2000:]
  run = shell.directory / "DIR"
  assert [row["step"] for row in metrics_file.read(run)] == [2, 4]
  weights_of, pictures = ("token_mixing", "sparsity"), ("confusion", "mistakes")
  drawn = [run / "curves.png", *(run / "weights" / f"{name}.png" for name in weights_of)]
  for path in drawn + [run / "pictures" / f"{name}.png" for name in pictures]:
    assert path.read_bytes().startswith(b"\x89PNG")
  with np.load(shell.directory / "predictions.npz") as arrays:
    assert arrays["outputs"].shape == (1000, 10) and arrays["targets"].shape == (1000,)
  weights = pretrained.read(str(shell.directory / "weights.npz"))
  assert weights.num_classes == 10 and weights.num_tokens == 16


def test_the_snippet_about_public_weights_runs(tmp_path, monkeypatch):
  """On a file of Mixer-B/16's size and layout, of random numbers, with 1,000 classes."""
  monkeypatch.chdir(tmp_path)
  images = np.zeros((1, 224, 224, 3), np.float32)
  random = models.build("mixer_b16", 1000)
  shapes = jax.eval_shape(random.init, jax.random.key(0), images)["params"]
  rng = np.random.default_rng(0)
  params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), shapes)
  pretrained.save("Mixer-B_16.npz", params)
  (snippet,) = snippets("docs/weights.md")
  names = {}
  exec(snippet, names)
  fitted, block = names["params"], "MixerBlock_3"
  jax.tree.map(np.testing.assert_array_equal, fitted[block], params[block])
  assert fitted["head"]["kernel"].shape == (768, 10) and not np.any(fitted["head"]["kernel"])
  again = pretrained.read("mine.npz")
  np.testing.assert_array_equal(again.arrays["stem/kernel"], params["stem"]["kernel"])
