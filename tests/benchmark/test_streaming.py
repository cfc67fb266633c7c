"""The photographs that streaming is measured with, and their rate."""

import os
import pathlib
import subprocess
import sys

from PIL import Image
import pytest

from mixer_jax import experiment
from mixer_jax.benchmark import fixed, streaming

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
  directory = tmp_path_factory.mktemp("photos")
  return directory, streaming.write_photos(directory, 64)


def test_photographs_are_like_those_of_imagenet(photos):
  directory, mean_bytes = photos
  files = list((directory / "train").glob("*/*.jpg"))
  assert len(files) == 64 and len(list((directory / "test").glob("*/*.jpg"))) == 8
  assert {Image.open(path).size for path in files} == {(500, 375)}
  assert 90e3 < mean_bytes < 130e3  # 138 GB in 1.28 million files


def test_their_rate_and_their_batches(photos, monkeypatch):
  monkeypatch.setattr(streaming, "_SECONDS", 0.1)
  config = streaming.config(photos[0], "mixer_s32", batch_size=4)
  config.mesh.data = 1
  rate = streaming.decoded_per_second(config.data, workers=0)
  assert 1 < rate < 2_000  # one thread takes about two milliseconds for each
  assert 5e-4 < streaming.cpu_seconds(config.data) < 0.1
  run = experiment.build(config)
  assert run.steps_per_epoch == 16
  assert fixed.batch(run)["image"].shape == (4, 224, 224, 3)


@pytest.mark.slow
def test_the_command():
  command = [sys.executable, "-m", "mixer_jax.benchmark", "input", "--models=mixer_s32"]
  command += ["--rounds=1", "--batch_size=2", "--photos=64", "--workers=0", "--workers=1"]
  one_device = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
  done = subprocess.run(
    command, cwd=ROOT, env=one_device, capture_output=True, text=True, check=True
  )
  assert "resident: the bundled sample" in done.stdout
  assert all(f"{n} workers" in done.stdout for n in (0, 1))
  assert done.stdout.count("ratio  ") == 2
