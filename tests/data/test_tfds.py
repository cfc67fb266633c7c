"""TFDS sets and the bundled sample, without a network and without TensorFlow."""

import socket
import subprocess
import sys
import time

import numpy as np
from PIL import Image
import pytest

from mixer_jax.data import tfds_source
from mixer_jax.errors import UserError
from tests import make_sample
from tests.images import loading
from tests.images.loading import error, load


@pytest.fixture(autouse=True)
def connections(monkeypatch):
  """Refuses every connection, as a machine without a network does, and lists them."""
  tried = []

  def refuse(*args, **_):
    tried.append(args)
    raise socket.gaierror("no network in this test")

  monkeypatch.setattr(socket, "getaddrinfo", refuse)
  monkeypatch.setattr(socket.socket, "connect", refuse)
  return tried


def _config(tmp_path, **fields):
  return loading.config(**dict(name="sample", cache_dir=str(tmp_path / "cache")) | fields)


@pytest.fixture
def source(tmp_path):
  """A folder of 4 + 2 random 32x32 JPEG images in each of two classes."""
  rng = np.random.default_rng(0)
  for split, num in ("train", 4), ("test", 2):
    for cls in "cat", "dog":
      (tmp_path / "jpg" / split / cls).mkdir(parents=True)
      for i in range(num):
        image = Image.fromarray(rng.integers(0, 256, (32, 32, 3), np.uint8))
        image.save(tmp_path / "jpg" / split / cls / f"{i}.jpg")
  return tmp_path / "jpg"


@pytest.mark.thorough
def test_sample_is_balanced_and_its_splits_share_no_image(tmp_path, connections):
  sample = load(_config(tmp_path))
  names = "airplane automobile bird cat deer dog frog horse ship truck"
  assert sample.class_names == tuple(names.split())
  assert sample.train.images.shape[1:] == sample.test.images.shape[1:] == (32, 32, 3)
  assert np.bincount(sample.train.labels).tolist() == [500] * 10
  assert np.bincount(sample.test.labels).tolist() == [100] * 10
  assert len(set(sample.train.labels[:100].tolist())) == 10, "the order should be shuffled"
  images = {image.tobytes() for split in (sample.train, sample.test) for image in split.images}
  assert len(images) == 6000
  mean = sample.train.images.mean((0, 1, 2)) / 255
  np.testing.assert_allclose(mean, [0.4914, 0.4822, 0.4465], atol=0.01)  # CIFAR-10's own
  assert not connections


def test_prepared_directory_is_read_without_a_connection(tmp_path, source, connections):
  made = make_sample.make_sample(source, tmp_path / "out", 3, 2)
  dataset = load(_config(tmp_path, name=make_sample.NAME, dir=str(tmp_path / "out")))
  assert made == tmp_path / "out" / "cifar10_sample" / "1.0.0" and dataset.class_names == (
    "cat",
    "dog",
  )
  by_class = {
    label: {np.asarray(Image.open(path)).tobytes() for path in (source / "test" / cls).iterdir()}
    for label, cls in enumerate(("cat", "dog"))
  }
  found = {0: set(), 1: set()}
  for image, label in zip(dataset.test.images, dataset.test.labels):
    found[int(label)].add(image.tobytes())
  assert found == by_class
  assert not connections and "tensorflow" not in sys.modules
  versioned = load(_config(tmp_path, name="cifar10_sample:1.0.0", dir=str(tmp_path / "out")))
  np.testing.assert_array_equal(versioned.train.images, dataset.train.images)
  assert "Unknown split 'validation'. Should be one of ['t" in error(
    _config(tmp_path, name="cifar10_sample", dir=str(tmp_path / "out"), test_split="validation")
  )


def test_make_sample_is_reproducible_and_balanced(tmp_path, source):
  one, two = (make_sample.make_sample(source, tmp_path / out, 3, 2) for out in ("one", "two"))
  names = sorted(path.name for path in one.iterdir())
  assert names == sorted(path.name for path in two.iterdir())
  for name in names:
    assert (one / name).read_bytes() == (two / name).read_bytes(), name
  assert "cyizhuo/CIFAR-10-dataset" in (one / "dataset_info.json").read_text()
  labels = load(_config(tmp_path, name=make_sample.NAME, dir=str(tmp_path / "one"))).train.labels
  assert np.bincount(labels).tolist() == [3, 3]
  with pytest.raises(UserError, match="has 4 images"):
    make_sample.make_sample(source, tmp_path / "three", 5, 2)


def test_unprepared_set_fails_within_15_seconds(tmp_path, connections):
  start = time.monotonic()
  line = error(_config(tmp_path, name="cifar10", dir=str(tmp_path / "none")))
  assert time.monotonic() - start < 15
  assert connections, "it should have tried"
  for part in (
    str(tmp_path / "none" / "cifar10"),
    "tfds.builder('cifar10'",
    "download_and_prepare",
    "www.cs.toronto.edu cannot be reached",
  ):
    assert part in line


@pytest.mark.parametrize(
  "name, group",
  [("glue/sst2", "text"), ("c4/realnewslike", "text"), ("wmt14_translate/de-en", "translate")],
)
def test_sets_of_text_are_known_by_name(name, group, tmp_path, monkeypatch):
  """TFDS itself knows none of them where h5py is missing."""
  monkeypatch.setattr(tfds_source, "_unreachable", lambda urls: "no network")
  seen = []
  with pytest.raises(UserError) as told:
    tfds_source.find(name, str(tmp_path), lambda features: seen.append(dict(features)))
  line = str(told.value)
  assert f"data.name={name}: not found in {tmp_path}" in line and "(no network)" in line
  assert f'python -c "import tensorflow_datasets.{group}, tensorflow_datasets as tfds;' in line
  assert {"sst2": "sentence", "realnewslike": "text", "de-en": "de"}[name.split("/")[1]] in seen[0]


def test_unknown_name_lists_what_is_close(tmp_path):
  line = error(_config(tmp_path, name="cifar11", dir=str(tmp_path)))
  assert "no such dataset in TFDS" in line and "cifar10" in line


def test_set_without_image_and_label_is_refused(tmp_path, source):
  made = make_sample.make_sample(source, tmp_path / "out", 3, 2)
  features = made / "features.json"
  features.write_text(features.read_text().replace('"label"', '"species"'))
  line = error(_config(tmp_path, name=make_sample.NAME, dir=str(tmp_path / "out")))
  assert (
    "needs the features image: Image, label: ClassLabel" in line and "species: ClassLabel" in line
  )


def test_damaged_prepared_directory_is_a_line(tmp_path, source):
  made = make_sample.make_sample(source, tmp_path / "out", 3, 2)
  config = _config(tmp_path, name=make_sample.NAME, dir=str(tmp_path / "out"))
  (shard,) = made.glob("*train*")
  shard.write_bytes(b"")
  assert str(made) in error(config)
  (made / "dataset_info.json").write_text("{")
  assert f"{made.parent} cannot be read: Failed to load JSON" in error(config)


def test_broken_record_names_its_place(tmp_path, source):
  whole = (source / "train" / "cat" / "0.jpg").read_bytes()
  (source / "train" / "cat" / "0.jpg").write_bytes(whole[:300])
  made = make_sample.make_sample(source, tmp_path / "out", 4, 2)
  line = error(_config(tmp_path, name=make_sample.NAME, dir=str(tmp_path / "out")))
  assert f"{made}, record" in line and "broken image" in line


@pytest.mark.thorough
def test_tensorflow_is_not_imported_even_if_installed(tmp_path):
  (tmp_path / "tensorflow").mkdir()
  (tmp_path / "tensorflow" / "__init__.py").write_text("import os; os._exit(77)")
  program = (
    "from tests.images import loading;"
    f"loading.load(loading.config(name='sample', cache_dir={str(tmp_path)!r}))"
  )
  subprocess.run(
    [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {program}"],
    check=True,
  )
