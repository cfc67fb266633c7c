"""The photographs of streamed input, and their rate."""

from PIL import Image
import pytest

from benchmarks import input as input_benchmark
from benchmarks import steps
from mixer_jax import experiment


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
  directory = tmp_path_factory.mktemp("photos")
  return directory, input_benchmark.write_photos(directory, 64)


@pytest.mark.thorough
def test_photographs_are_like_those_of_imagenet(photos):
  directory, mean_bytes = photos
  files = list((directory / "train").glob("*/*.jpg"))
  assert len(files) == 64 and len(list((directory / "test").glob("*/*.jpg"))) == 8
  assert {Image.open(path).size for path in files} == {(500, 375)}
  assert 90e3 < mean_bytes < 130e3  # 138 GB in 1.28 million files


@pytest.mark.slow
def test_their_rate_and_their_batches(photos, monkeypatch):
  monkeypatch.setattr(input_benchmark, "_SECONDS", 0.1)
  config = input_benchmark.photo_config(photos[0], "mixer_s32", batch_size=4)
  config.mesh.data = 1
  images = input_benchmark.photos(config)
  rate = input_benchmark.decoded_per_second(images)
  assert 1 < rate < 2_000  # one thread takes about two milliseconds for each
  assert 5e-4 < input_benchmark.cpu_seconds(images) < 0.1
  run = experiment.build(config)
  assert run.clock.steps_per_epoch == 16
  assert steps.batch(run)["image"].shape == (4, 224, 224, 3)
