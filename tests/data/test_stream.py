"""Streams: their order, their faults, and the ends of their workers."""

import gc
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
from PIL import Image
import pytest

from mixer_jax.data import order, stream
from mixer_jax.data.dataset import examples
from mixer_jax.errors import UserError
from mixer_jax.images import sources
from tests.images import loading
from tests.images.loading import load

SIZES = {"train": 40, "test": 13}


@pytest.fixture(autouse=True)
def no_workers_are_left():
  gc.collect()
  assert not multiprocessing.active_children()
  yield
  gc.collect()
  assert not multiprocessing.active_children()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
  """JPEG images of many sizes in two classes, a colour of its own in each."""
  root = tmp_path_factory.mktemp("folder")
  rng = np.random.default_rng(0)
  for split, num in SIZES.items():
    for i in range(num):
      folder = root / split / ("cat", "dog")[i % 2]
      folder.mkdir(parents=True, exist_ok=True)
      pixels = rng.integers(20, 236, 3) + rng.integers(-20, 20, (4, 6, 3))
      size = (int(rng.integers(40, 80)), int(rng.integers(40, 80)))
      Image.fromarray(pixels.astype(np.uint8)).resize(size).save(folder / f"{i}.jpg")
  return root


def config(root, **fields):
  own = dict(dir=str(root), crop="inception", smallest_crop=0.3, resize=36, image_size=32)
  return loading.config(**own | fields)


def open_stream(root, seed=5, batch_size=20, rows=None, split="train", **fields):
  dataset = load(config(root, **fields)).splits[split]
  rows = np.arange(batch_size) if rows is None else rows
  return stream.Stream(dataset, order.Order(seed, len(dataset), batch_size), rows, seed)


def take(opened, epoch, batch, count):
  """Images and labels of an epoch of two steps."""
  found = opened.take(2 * (epoch - 1) + batch, count)
  assert found.keys() == {"image", "label"}
  return found["image"], found["label"]


def assert_same(a, b):
  for x, y in zip(a, b, strict=True):
    np.testing.assert_array_equal(x, y)


def alive(pid):
  try:
    return "Z" not in pathlib.Path(f"/proc/{pid}/stat").read_text().split(") ")[1][:1]
  except FileNotFoundError:
    return False


def wait_until(done, seconds=60):
  end = time.monotonic() + seconds
  while not done() and time.monotonic() < end:
    time.sleep(0.05)
  return done()


@pytest.fixture(scope="module")
def expected(root):
  """The batches of two epochs, each alone, without workers."""
  single = open_stream(root)
  return {(e, b): take(single, e, b, 1) for b in (1, 0) for e in (2, 1)}


def test_batches_hold_crops_of_their_examples(root, expected):
  whole = load(config(root, crop="", stored_size=64, stream="always")).train.images
  for (epoch, batch), (images, labels) in expected.items():
    ids = order.train_indices(5, epoch, 40, 20)[batch]
    assert images.shape == (1, 20, 32, 32, 3) and images.dtype == np.uint8
    for example, image, label in zip(ids, images[0], labels[0], strict=True):
      original = whole.read(int(example), np.random.default_rng(0))
      pixels = original["image"]
      assert label == original["label"]
      low, high = pixels.min((0, 1)).astype(int), pixels.max((0, 1)).astype(int)
      assert (image.min((0, 1)) >= low - 16).all() and (image.max((0, 1)) <= high + 16).all()
  crops = []
  for epoch in (1, 2):
    ids = order.train_indices(5, epoch, 40, 20)
    pixels = np.concatenate([expected[epoch, batch][0][0] for batch in (0, 1)])
    crops.append(dict(zip(np.concatenate(ids[:2]).tolist(), pixels)))
  both = crops[0].keys() & crops[1].keys()
  same = [np.array_equal(crops[0][example], crops[1][example]) for example in both]
  assert len(same) > 30 and np.mean(same) < 0.1, "another epoch has other crops"


@pytest.mark.thorough
def test_workers_change_nothing(root, expected):
  parallel = open_stream(root, workers=2)
  assert_same(take(parallel, 1, 0, 2), map(np.concatenate, zip(expected[1, 0], expected[1, 1])))
  pids = [p.pid for p in multiprocessing.active_children()]
  assert len(pids) == 2
  # They go on to the next epoch without starting anew, and skip where they are told to.
  assert_same(take(parallel, 2, 0, 1), expected[2, 0])
  assert [p.pid for p in multiprocessing.active_children()] == pids
  assert_same(take(parallel, 1, 1, 1), expected[1, 1])
  del parallel
  assert not multiprocessing.active_children()


def test_a_process_decodes_its_rows_only(root, expected):
  rows = np.array([0, 1, 2, 3, 17, 18, 19])
  images, labels = take(open_stream(root, rows=rows), 2, 1, 1)
  assert_same((images, labels), (x[:, rows] for x in expected[2, 1]))


def test_the_test_split_is_cropped_at_its_centre(root):
  images = load(config(root)).test.images
  assert len(images) == 13 and images.spec["image"].shape == (32, 32, 3)
  names = sorted((root / "test").glob("*/*.jpg"), key=lambda p: (p.parent.name, p.name))
  found = examples(images, range(13))["image"]
  for path in names:
    image = Image.open(path)
    size = [int(36 * n / min(image.size)) for n in image.size]  # as torchvision's Resize
    large = image.resize(size, Image.Resampling.BILINEAR)
    left, top = (round((n - 32) / 2) for n in size)  # as its CenterCrop
    centre = np.asarray(large)[top : top + 32, left : left + 32]
    assert sum(np.array_equal(centre, x) for x in found) == 1


def test_slices_of_encoded_splits_are_those_of_decoded_ones(root, tmp_path):
  fields = dict(
    crop="", stored_size=24, cache_dir=str(tmp_path), train_split="train[:25%]+test[-3:]"
  )
  encoded = load(config(root, stream="always", **fields)).splits["train"]
  decoded = load(config(root, stream="never", **fields)).train
  assert len(encoded) == len(decoded.images) == 13
  found = examples(encoded, range(13))
  assert_same((found["image"], found["label"]), (decoded.images, decoded.labels))


@pytest.mark.parametrize("limit, streamed", [(20_000, True), (30_000_000, False)])
def test_large_sets_are_streamed_by_themselves(root, limit, streamed, monkeypatch, tmp_path):
  monkeypatch.setattr(sources, "CACHED_BYTES", limit)
  fields = dict(crop="", stored_size=24, cache_dir=str(tmp_path))
  dataset = load(config(root, **fields))
  assert (dataset.train.labels is None) == streamed
  assert list(tmp_path.iterdir()) == [] if streamed else len(list(tmp_path.iterdir())) == 2


@pytest.fixture
def damaged(root):
  """One of the training images is cut short while the test lasts."""
  path = root / "train" / "dog" / "7.jpg"
  content = path.read_bytes()
  path.write_bytes(content[:200])
  yield path
  path.write_bytes(content)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.first(1)
def test_a_broken_image_is_named(damaged, root, workers):
  broken = open_stream(root, workers=workers)
  with pytest.raises(UserError, match="dog/7.jpg: broken image") as error:
    for epoch in (1, 2):
      take(broken, epoch, 0, 2)
  assert "\n" not in str(error.value)
  assert wait_until(lambda: not multiprocessing.active_children())


def test_images_of_several_sizes_are_refused_by_name(root):
  with pytest.raises(UserError, match=r"\.jpg has \d+x\d+ pixels .* set data.stored_size"):
    open_stream(root, crop="", stream="always", test_split="train")


def test_labels_without_a_class_are_refused_by_name(root):
  image = load(config(root)).train.images
  records, _rows = image.parts[0]
  object.__setattr__(records, "read", lambda i: (b"", -1))
  with pytest.raises(UserError, match=r"\.jpg: has the label -1; allowed: 0 to 1"):
    image.read(0, np.random.default_rng(0))


@pytest.mark.thorough
def test_a_killed_worker_is_told(root):
  killed = open_stream(root, workers=1)
  take(killed, 1, 0, 1)
  (worker,) = multiprocessing.active_children()
  os.kill(worker.pid, signal.SIGKILL)
  with pytest.raises(UserError, match="died: .*-9.*data.workers and data.read_ahead"):
    for epoch in range(1, 5):
      take(killed, epoch, 1, 1)
      take(killed, epoch + 1, 0, 1)
  assert not multiprocessing.active_children()


_PROGRAM = """
import multiprocessing, sys
sys.modules["tensorflow"] = None
from tests.data.test_stream import open_stream, take

if __name__ == "__main__":
  stream = open_stream(sys.argv[1], workers=1)
  take(stream, 1, 0, 1)
  print(*(p.pid for p in multiprocessing.active_children()), flush=True)
  for epoch in range(1, 4):
    sys.stdin.readline()
    take(stream, epoch, 1, 1)
    take(stream, epoch + 1, 0, 1)
    print("more", flush=True)
"""


@pytest.mark.thorough
def test_workers_outlive_ctrl_c_but_not_their_parent(root, tmp_path):
  script = tmp_path / "program.py"
  script.write_text(_PROGRAM)
  process = subprocess.Popen(
    [sys.executable, str(script), str(root)],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
    cwd=pathlib.Path(__file__).parent.parent.parent,
    env=os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parent.parent.parent)},
  )
  with process:
    (worker,) = map(int, process.stdout.readline().split())
    os.kill(worker, signal.SIGINT)
    os.kill(worker, signal.SIGTERM)
    print("go", file=process.stdin, flush=True)
    assert process.stdout.readline() == "more\n" and alive(worker)
    process.kill()
  assert wait_until(lambda: not alive(worker))
