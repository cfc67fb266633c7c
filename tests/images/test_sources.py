"""Folders, .npz files, splits and the cache."""

import dataclasses
import logging
import os
import shutil

import numpy as np
from PIL import Image
import pytest

from mixer_jax.data import splits
from mixer_jax.errors import UserError
from mixer_jax.images import decode, sources
from mixer_jax.images.image_data import ImageData
from tests.images import loading
from tests.images.loading import error, load


def _config(tmp_path, **fields):
  own = dict(dir=str(tmp_path / "root"), cache_dir=str(tmp_path / "cache"))
  return loading.config(**own | fields)


def _colour(split, cls, i):
  return (10 * i, 100 if cls == "cat" else 200, 0 if split == "train" else 50)


@pytest.fixture
def root(tmp_path):
  """A folder of 10 + 3 images of 8x6 in each of two classes, one colour each, as PNG."""
  for split, num in ("train", 10), ("test", 3):
    for cls in "dog", "cat":
      (tmp_path / "root" / split / cls).mkdir(parents=True)
      for i in range(num):
        Image.new("RGB", (8, 6), _colour(split, cls, i)).save(
          tmp_path / "root" / split / cls / f"{i}.png"
        )
  return tmp_path / "root"


def test_folders_named_by_numbers_in_the_order_of_texts_are_told(tmp_path, root, caplog):
  for split in ("train", "test"):
    for i in range(12):
      shutil.copytree(root / split / "cat", root / split / str(i))
    shutil.rmtree(root / split / "cat")
    shutil.rmtree(root / split / "dog")
  assert load(_config(tmp_path)).class_names == tuple(sorted(map(str, range(12))))
  told = [m for m in caplog.messages if "order of texts" in m]  # once, not for each split
  assert told == [f"{root / 'train'}: the classes have the order of texts: 0, 1, 10, 11, ..."]


def test_folder_has_the_right_pixels_labels_and_names(tmp_path, root, caplog):
  (root / "train" / "cat" / "notes.txt").write_text("not an image")
  (root / "train" / ".DS_Store").write_text("")
  dataset = load(_config(tmp_path))
  assert "root/train: not read are 1 of .txt; " in caplog.text
  assert dataset.class_names == ("cat", "dog")
  for split, num in ("train", 10), ("test", 3):
    images, labels = getattr(dataset, split).images, getattr(dataset, split).labels
    assert (
      images.shape == (2 * num, 6, 8, 3) and images.dtype == np.uint8 and labels.dtype == np.int32
    )
    assert (images == images[:, :1, :1]).all()
    found = {(*image[0, 0].tolist(), int(label)) for image, label in zip(images, labels)}
    assert found == {
      (*_colour(split, cls, i), y) for i in range(num) for y, cls in enumerate(("cat", "dog"))
    }


def test_slices_partition_a_class_sorted_folder_and_keep_all_classes(tmp_path, root):
  dataset = load(_config(tmp_path, train_split="train[:75%]", test_split="train[75%:]"))
  assert len(dataset.train.labels) == 15 and len(dataset.test.labels) == 5
  assert set(dataset.train.labels.tolist()) == set(dataset.test.labels.tolist()) == {0, 1}
  colours = np.concatenate([dataset.train.images, dataset.test.images])[:, 0, 0]
  assert len(np.unique(colours, axis=0)) == 20
  summed = load(_config(tmp_path, train_split="train[:2]+train[-3:]")).train.labels
  both = np.concatenate([dataset.train.labels, dataset.test.labels])
  np.testing.assert_array_equal(summed, np.concatenate([both[:2], both[-3:]]))


def test_paths_of_nested_splits_are_below_the_directory_of_the_set(tmp_path, root):
  for year in ("2023", "2024"):
    (tmp_path / "years" / year).mkdir(parents=True)
    for split in ("train", "test"):
      (tmp_path / "years" / year / split).symlink_to(root / split)
  splits = dict(train_split="2023/train", test_split="2023/test[:2]+2024/test[:2]")
  found = load(_config(tmp_path, dir=str(tmp_path / "years"), **splits))
  paths = found.splits["test"].paths
  assert all((tmp_path / "years" / path.decode()).is_file() for path in paths)
  assert len(set(paths.tolist())) == 4


@pytest.mark.parametrize("fields", [{}, {"stream": "always"}])
def test_paths_are_those_of_the_images_also_of_slices_and_further_sets(tmp_path, root, fields):
  spec, further = "train[2:9]+test[:3]", f"again={root / 'test'}"
  found = load(
    _config(tmp_path, test_split=spec, train_split="train[9:]", test_sets=further, **fields)
  )
  for name, num in ("train", 11), ("test", 10), ("again", 6):
    split, paths = found.splits[name], [path.decode() for path in found.splits[name].paths]
    assert len(paths) == len(split) == num
    for i, (base, cls, file) in enumerate(path.split("/") for path in paths):
      read = split.read(i, None) if fields else {k: x[i] for k, x in split.arrays().items()}
      assert tuple(read["image"][0, 0]) == _colour(base, cls, int(file.removesuffix(".png")))
      assert found.class_names[read["label"]] == cls


def test_names_of_files_may_have_spaces_inside():
  spec = "my texts/part 1.txt[:50%]+b.txt"
  assert splits.base_names(spec, "f") == ["my texts/part 1.txt", "b.txt"]
  for bad in ("my texts /a.txt", "a [:5]", "a/ b"):
    with pytest.raises(UserError, match="not a split"):
      splits.base_names(bad, "f")


def test_percent_bounds_by_hand():
  for spec, expected in (("a[:50%]", 4), ("a[50%:]", 3), ("a[-10%:]", 1), ("a[1:3]", 2), ("a", 7)):
    [(_, rows)] = splits.parts(spec, "f", lambda _: 7)
    assert len(rows) == expected


@pytest.mark.parametrize(
  "one, two, shared",
  [
    ("test", "test", True),
    ("test[:50%]", "test", True),
    ("test[:]", "test", True),
    ("train[90%:]", "test", False),
    ("test[:50%]", "test[50%:]", False),
    ("test[:50%]", "test[40%:]", True),
    ("all.mat[924:1024]", "all.mat[-100:]", False),  # it depends on the size
    ("x[10:20]", "x[20:]", False),
    ("x[10:21]", "x[20:]", True),
    ("a/b", "a", True),
    ("train+test[:10%]", "test", True),
    ("no * split", "no * split", True),
    ("no * split", "test", False),
  ],
)
def test_splits_that_surely_share_examples(one, two, shared):
  assert splits.surely_share(one, two) == splits.surely_share(two, one) == shared


def test_images_without_class_folders_are_for_tasks_without_labels(tmp_path, root):
  for base in ("train", "test"):
    (tmp_path / "flat" / base).mkdir(parents=True)
    for path in sorted((root / base).glob("*/*")):
      path.rename(tmp_path / "flat" / base / f"{path.parent.name}_{path.name}")
  config = _config(tmp_path, dir=str(tmp_path / "flat"))
  assert "no class folders in it; an image folder has the layout" in error(config)
  found = sources.load(config, labelled=False)
  assert found.class_names == ("",) and len(found.splits["train"]) == 20
  assert not found.splits["train"].arrays()["label"].any()


def test_stored_size_makes_squares_and_says_how(tmp_path, root, caplog):
  wide = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 50, 3), np.uint8))
  for path in (root / "train").glob("*/*"):
    wide.save(path)
  resized = lambda *size: np.asarray(wide.resize(size, Image.Resampling.BILINEAR))
  expected = {
    "crop": (resized(25, 10)[:, 8:18], "60% of it, outside the centre, is cut off"),
    "pad": (np.pad(resized(10, 4), ((3, 3), (0, 0), (0, 0))), "60% of that is black"),
    "squash": (resized(10, 10), "its proportions change by 60%"),
  }
  assert ImageData().fit == "pad"
  for fit, (image, line) in expected.items():
    caplog.clear()
    with caplog.at_level(logging.INFO):
      images = load(_config(tmp_path, stored_size=10, fit=fit)).train.images
    assert images.shape == (20, 10, 10, 3)
    np.testing.assert_array_equal(images[0], image)
    assert f"data.fit={fit}: the first image, 50x20 pixels, becomes 10x10; {line}" in caplog.text


@pytest.mark.parametrize("stream", ["never", "always"])
def test_images_of_twelve_bits_in_files_of_sixteen_are_told(tmp_path, root, caplog, stream):
  rng = np.random.default_rng(0)
  for bits in (16, 12):
    caplog.clear()
    for path in root.glob("*/*/*"):
      Image.fromarray(rng.integers(0, 2**bits, (6, 8), np.uint16)).save(path)
    load(_config(tmp_path, stream=stream))
    assert ("nearly all pixels are 16 or less of 255" in caplog.text) == (bits == 12)


def test_own_images_have_neither_the_statistics_of_cifar_nor_are_they_mirrored():
  own, cifar = ImageData(name="folder"), ImageData(name="cifar10")
  assert (own.mean, own.std, own.flip) == ((0.5,) * 3, (0.5,) * 3, False)
  assert (cifar.mean[0], cifar.std[0], cifar.flip) == (0.4914, 0.2023, True)
  assert ImageData(name="folder", flip=True, mean=(0.1,) * 3).mean == (0.1,) * 3


def test_second_start_reads_the_cache_without_decoding(tmp_path, root, monkeypatch):
  first = load(_config(tmp_path))
  assert isinstance(first.train.images, np.memmap) and not first.train.images.flags.writeable
  monkeypatch.setattr(decode, "decode_all", lambda *_: pytest.fail("decoded"))
  second = load(_config(tmp_path))
  for split in "train", "test":
    np.testing.assert_array_equal(getattr(first, split).images, getattr(second, split).images)
    np.testing.assert_array_equal(getattr(first, split).labels, getattr(second, split).labels)


@pytest.mark.parametrize("change", ["pixels", "new_file", "renamed_class", "stored_size"])
def test_a_changed_folder_is_decoded_again(tmp_path, root, change):
  before = load(_config(tmp_path))
  image = root / "train" / "cat" / "0.png"
  if change == "pixels":
    Image.new("RGB", (8, 6), (1, 2, 3)).save(image)
    os.utime(image, ns=(1, 1))
  elif change == "new_file":
    Image.new("RGB", (8, 6), (1, 2, 3)).save(root / "train" / "cat" / "new.png")
  elif change == "renamed_class":  # Labels of the test split follow the train split's classes.
    (root / "train" / "ant").mkdir()
    Image.new("RGB", (8, 6), (1, 2, 3)).save(root / "train" / "ant" / "0.png")
  after = load(_config(tmp_path, stored_size=4 if change == "stored_size" else 0))
  if change == "stored_size":
    assert after.train.images.shape == (20, 4, 4, 3) and before.train.images.shape == (20, 6, 8, 3)
  else:
    assert (after.train.images[:, 0, 0] == [1, 2, 3]).all(-1).any()
  if change == "renamed_class":
    assert after.class_names == ("ant", "cat", "dog") and set(after.test.labels.tolist()) == {1, 2}


@pytest.mark.parametrize("damage", ["flip", "truncate", "no_meta", "bad_meta", "labels", "empty"])
def test_a_damaged_cache_is_rebuilt(tmp_path, root, damage):
  before = np.array(load(_config(tmp_path)).train.images)
  (entry,) = (tmp_path / "cache").glob("folder-train-*")
  images = entry / "images.npy"
  content = images.read_bytes()
  if damage == "flip":
    images.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
  elif damage == "truncate":
    images.write_bytes(content[:-100])
  elif damage == "no_meta":
    (entry / "meta.json").unlink()
  elif damage == "bad_meta":
    (entry / "meta.json").write_text("{")
  elif damage == "labels":
    np.save(entry / "labels.npy", np.zeros(20, np.int32))
  elif damage == "empty":
    for path in entry.iterdir():
      path.write_bytes(b"")
  again = load(_config(tmp_path)).train
  np.testing.assert_array_equal(again.images, before)
  assert images.read_bytes() == content and set(again.labels.tolist()) == {0, 1}
  assert len(list((tmp_path / "cache").iterdir())) == 2


def test_an_unwritable_cache_is_a_warning(tmp_path, root, caplog):
  (tmp_path / "file").write_text("")
  with caplog.at_level(logging.WARNING):
    dataset = load(_config(tmp_path, cache_dir=str(tmp_path / "file" / "cache")))
  assert len(dataset.train.labels) == 20 and not isinstance(dataset.train.images, np.memmap)
  assert sum("cannot be used" in r.getMessage() for r in caplog.records) == 1


def _npz(tmp_path, **changes):
  rng = np.random.default_rng(0)
  arrays = dict(
    train_images=rng.integers(0, 256, (10, 4, 5, 3), np.uint8),
    train_labels=np.arange(10) % 3,
    test_images=rng.integers(0, 256, (4, 4, 5, 3), np.uint8),
    test_labels=np.arange(4) % 3,
  )
  arrays = {k: v for k, v in {**arrays, **changes}.items() if v is not None}
  np.savez(tmp_path / "a.npz", **arrays)
  return _config(tmp_path, name="npz", dir=str(tmp_path / "a.npz")), arrays


def test_npz(tmp_path):
  config, arrays = _npz(tmp_path)
  dataset = load(config)
  np.testing.assert_array_equal(dataset.train.images, arrays["train_images"])
  np.testing.assert_array_equal(dataset.test.labels, arrays["test_labels"])
  assert dataset.class_names == ("0", "1", "2") and dataset.train.labels.dtype == np.int32
  parts = load(dataclasses.replace(config, train_split="train[:60%]", test_split="train[60%:]"))
  assert sorted(np.concatenate([parts.train.labels, parts.test.labels])) == sorted(
    arrays["train_labels"]
  )
  config, _ = _npz(tmp_path, class_names=np.array(["a", "b", "c", "d"]))
  assert load(config).class_names == ("a", "b", "c", "d")
  config, _ = _npz(tmp_path, class_names=np.array([b"a", b"\xc3\xa4", b"c"]))
  assert load(config).class_names == ("a", "ä", "c")


def test_an_npz_whose_labels_leave_a_class_out_is_told(tmp_path, caplog):
  config, _ = _npz(tmp_path)
  load(config)
  assert not caplog.text
  config, _ = _npz(tmp_path, train_labels=1 + np.arange(10) % 3)
  assert load(config).class_names == ("0", "1", "2", "3")
  assert caplog.text.count("train_labels are of 4 classes, 1 without an image: 0") == 1


def test_an_npz_without_arrays_named_train(tmp_path):
  config, arrays = _npz(tmp_path)
  np.savez(
    tmp_path / "all.npz", all_images=arrays["train_images"], all_labels=arrays["train_labels"]
  )
  fields = dict(dir=str(tmp_path / "all.npz"), train_split="all[:60%]", test_split="all[60%:]")
  dataset = load(dataclasses.replace(config, **fields))
  assert (len(dataset.train.labels), len(dataset.test.labels)) == (6, 4)
