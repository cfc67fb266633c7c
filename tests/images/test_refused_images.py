"""Sets of images that are broken or odd: each mistake is a line that names its place."""

import io
import re
import shutil
import struct
import zipfile
import zlib

import numpy as np
from PIL import Image
import pytest

from mixer_jax.errors import UserError
from mixer_jax.images.policy import Augment
from tests.images import loading
from tests.images.loading import error, load, write
from tests.images.test_decode import NOISE, encoded


def config(root, **fields):
  return loading.config(**dict(dir=str(root), cache_dir=str(root.parent / "cache")) | fields)


@pytest.fixture
def root(tmp_path):
  """Two classes of two images in each split, 8x6 pixels."""
  for split in "train", "test":
    for cls in "cat", "dog":
      (tmp_path / "root" / split / cls).mkdir(parents=True)
      for i in range(2):
        Image.new("RGB", (8, 6), (100 * i, 7, 9)).save(tmp_path / "root" / split / cls / f"{i}.png")
  return tmp_path / "root"


def png(width, height, bits=8, colour=2, rows=b""):
  """A PNG file that claims a size and holds some rows."""
  chunk = lambda kind, content: (
    struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
  )
  header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
  body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
  return b"\x89PNG\r\n\x1a\n" + body


POSTSCRIPT = b"""%!PS-Adobe-3.0 EPSF-3.0
%%BoundingBox: 0 0 8 6
%%EndComments
(sprung) (w) file closefile
"""


@pytest.mark.parametrize(
  "content, message",
  [
    (b"", "broken image: the file is empty"),
    (b"hello", "not an image; read are JPEG, PNG, WEBP, BMP"),
    (b"<html>404</html>", "not an image"),
    (POSTSCRIPT, "not an image"),  # Pillow would hand it to Ghostscript, which runs it
    (encoded(NOISE, "TIFF"), "not an image"),
    (encoded(NOISE, "GIF"), "not an image"),
    (encoded(NOISE)[:-60], "broken image"),
    (encoded(NOISE, "JPEG")[:300], "broken image"),
    (encoded(NOISE, "BMP")[:100], "broken image"),
    (encoded(NOISE, "WEBP")[:60], "broken image"),
    (encoded(NOISE)[:40], "broken image"),
    (png(0, 5), "broken image"),
    (png(8, 6), "broken image"),
    (png(2**31 - 1, 2**31 - 1, 1, 0), "refused: the image has more than 89,478,485 pixels"),
    (png(40_000, 40_000, 1, 0), "refused: the image has more than"),
    # Once it is resized.
    (encoded(Image.new("L", (1, 2_000_000))), "refused: the image has more than"),
  ],
)
def test_a_broken_or_hostile_image(root, content, message, monkeypatch):
  monkeypatch.chdir(root)
  (root / "train" / "cat" / "0.png").write_bytes(content)
  line = error(config(root, stored_size=8, fit="crop"))
  assert message in line and str(root / "train" / "cat" / "0.png") in line
  assert not list(root.parent.rglob("*sprung*"))


def broken(content):
  return lambda root: (root / "train" / "cat" / "1.png").write_bytes(content)


def one_class(root):
  for split in "train", "test":
    shutil.rmtree(root / split / "dog")


def other_test_class(root):
  (root / "test" / "bird").mkdir()


def without_test(root):
  (root / "test").rename(root / "elsewhere")


def without_classes(root):
  without_test(root)
  (root / "test").mkdir()


def without_images(root):
  for path in (root / "test").glob("*/*"):
    path.rename(path.with_suffix(".tiff"))


def flat_test(root):
  for path in sorted((root / "test").glob("*/*")):
    path.rename(root / "test" / f"{path.parent.name}_{path.name}")
    shutil.rmtree(path.parent) if not list(path.parent.iterdir()) else None


def smaller_test(root):
  for path in (root / "test").glob("*/*"):
    Image.new("RGB", (5, 5)).save(path)


@pytest.mark.parametrize(
  "spoil, place, message",
  [
    (one_class, "", "has only the class 'cat'; allowed: two or more"),
    (broken(encoded(NOISE.resize((7, 6)))), "7x6", "set data.stored_size"),
    (other_test_class, "test/bird", "not among the 2 class folders"),
    (
      lambda root: (root / "train" / "bird").mkdir(),
      "train/bird",
      "no images in this class folder",
    ),
    (without_test, "root/test", "no such folder (folders in data.dir: elsewhere, train)"),
    (without_classes, "root/test", "no class folders"),
    (without_images, "root/test", "images end in .jpg, .jpeg, .png"),
    (flat_test, "root/test", "no class folders in it"),
    (smaller_test, "test has 5x5 pixels", "but train has 8x6 pixels"),
    (
      lambda root: (root / "train" / "cat" / "2.png").symlink_to("nothing.png"),
      "cat/2.png",
      "cannot be read: No such file or directory",
    ),
    (shutil.rmtree, "root", "no such folder"),
  ],
)
def test_a_folder_that_is_no_data_set(root, spoil, place, message):
  spoil(root)
  line = error(config(root))
  assert message in line and place in line
  assert not list((root.parent / "cache").glob(".building*")), "rubbish left behind"


def test_hidden_files_and_links_to_folders_are_no_trouble(root, tmp_path):
  (root / ".git").mkdir()
  (root / "train" / ".cache").mkdir()
  (root / "train" / "cat" / ".0.png").write_text("")
  (root / "train" / "cat" / "._0.png").write_text("")
  shutil.move(root / "test", tmp_path / "elsewhere")
  (root / "test").symlink_to(tmp_path / "elsewhere")
  dataset = load(config(root))
  assert dataset.class_names == ("cat", "dog") and len(dataset.test.labels) == 4


def test_folders_that_are_not_read_are_told(root, caplog):
  load(config(root))
  assert not caplog.text
  (root / "train" / "cat" / "images.png").mkdir()  # the ending of an image
  shutil.copy(root / "train" / "cat" / "0.png", root / "test" / "a.png")
  for image in (root / "test" / "dog").iterdir():
    image.unlink()
  assert len(load(config(root)).test.labels) == 2
  inner, empty, loose = caplog.messages
  assert inner.startswith(f"{root / 'train'}: not read are 1 folders in class folders; ")
  assert empty.startswith(f"{root / 'test' / 'dog'}: no images in this class folder")
  assert loose.startswith(f"{root / 'test'}: not read are 1 images beside the class folders; ")


def archive(path, **members):
  with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
    for name, content in members.items():
      file.writestr(f"{name}.npy", content)


def npy(array):
  file = io.BytesIO()
  np.save(file, array)
  return file.getvalue()


IMAGES, LABELS = np.zeros((4, 2, 3, 3), np.uint8), np.arange(4) % 2


@pytest.mark.parametrize(
  "changes, message",
  [
    (dict(train_images=npy(IMAGES)[:-5]), "'train_images' cannot be read: train_images has 67 b"),
    (dict(train_images=npy(IMAGES).replace(b"(4, 2", b"(9, 2")), "has 72 bytes, not those of"),
    (dict(train_images=npy(np.array([{}], object))), "Object arrays cannot be loaded"),
    (dict(train_images=npy(IMAGES / 255)), "train_images is float64"),
    (dict(test_images=None), "has no array 'test_images'"),
    (dict(test_images=npy(IMAGES[:, :1])), "test has 3x1 pixels"),
    (dict(train_labels=npy(LABELS[:3])), "for 4 images"),
    (dict(train_labels=npy(np.array([0, 1, 2**32, 1]))), "labels run from 0 to 4294967296"),
    (dict(train_labels=npy(np.array([0, 1, -(2**32), 1]))), "labels run from -4294967296 to 1"),
    (dict(train_labels=npy(0 * LABELS), test_labels=npy(0 * LABELS)), "only the class"),
    (dict(class_names=npy(np.array([b"\xff\xfe", b"a"]))), "class_names is not UTF-8"),
    (dict(class_names=npy(np.array(["a", "b", "a"]))), "class_names has 'a' 2 times"),
  ],
)
def test_an_npz_that_is_no_data_set(tmp_path, changes, message):
  members = {f"{split}_images": npy(IMAGES) for split in ("train", "test")}
  members |= {f"{split}_labels": npy(LABELS) for split in ("train", "test")} | changes
  archive(tmp_path / "a.npz", **{k: v for k, v in members.items() if v is not None})
  assert message in error(config(tmp_path, name="npz", dir=str(tmp_path / "a.npz")))


def test_files_that_are_no_npz(tmp_path):
  (tmp_path / "text.npz").write_text("hello")
  cases = {"": "no file", "/nowhere.npz": "no file", tmp_path / "text.npz": "cannot be read"}
  for path, message in cases.items():
    line = error(config(tmp_path, name="npz", dir=str(path)))
    assert f"data.dir={str(path)!r}" in line and message in line


@pytest.mark.parametrize(
  "fields, message",
  [
    (dict(test_split="train["), "data.test_split='train\\[': not a split"),
    (dict(test_split="train[:101%]"), "lies outside"),
    (dict(test_split="train[5:]"), "lies outside"),
    (dict(test_split="train[3:3]"), "selects none"),
    (dict(test_split="../train"), "files are named below data.dir"),
    (dict(test_split="train[:3]+train[2:]"), "takes examples of 'train' twice"),
    (dict(extra_test_splits="a,b["), "data.extra_test_splits='b.': not a split"),
    (dict(extra_test_splits="test[:1],test"), "has 'test', the name of a split with its own"),
    (dict(extra_test_splits="test[:1],test[:1]"), "twice; allowed: once"),
    (dict(name="sample"), "data.dir is .*, but data.name is 'sample'"),
    (dict(crop="inception", resize=32, stream="never"), "data.crop=inception: needs the encoded"),
    (dict(crop="inception", resize=32, stored_size=8), "data.crop=inception: data.stored_size"),
    (dict(crop="inception"), "data.resize is 0; allowed: at least data.image_size, 32"),
    (dict(resize=8), "data.resize is 8; allowed: 0, or at least data.image_size, 32"),
    (dict(pad=32), "data.pad is 32"),
    (dict(random_crop=True), "data.random_crop is True, but data.resize"),
    (dict(name="npz", stored_size=8), "data.stored_size=8: .* decoded already; set it to 0"),
    (dict(name="npz", stream="always"), "data.stream=always: .* set it to auto"),
  ],
)
def test_options_that_contradict_each_other(root, fields, message):
  assert re.search(message, error(config(root, **fields)))


@pytest.mark.parametrize("other", [dict(pad=4), dict(resize=36, random_crop=True, pad=4)])
def test_two_random_crops_are_refused(other):
  fields = dict(pad=0, resize=0, random_crop=False, crop="") | other
  with pytest.raises(UserError, match="augment.smallest_area is 0.08: .*data."):
    Augment(smallest_area=0.08).check(**fields)
  Augment(smallest_area=0.08).check(**fields | dict(resize=36, random_crop=False))  # no padding


FURTHER = {
  "size": (dict(test_sets="a={}/9.npz"), "the training data has 8x8 pixels"),
  "length": (dict(test_sets="a={}/8.npz", test_labels="a={}/list.json"), "1 lists .* 3 examples"),
  "pair": (dict(test_sets="v2"), "data.test_sets has 'v2'; allowed: NAME=VALUE"),
  "twice": (dict(test_sets="a=x,a=y"), "each name once"),
  "split": (dict(test_sets="test=x"), "'test', the name of a split"),
  "labels": (dict(test_labels="b=x.json"), "data.test_labels has 'b', which is not in"),
  "missing": (dict(test_sets="a=/none"), "/none: no such folder"),
  "file": (dict(test_sets="a={}/odd", test_labels="a={}/no.json"), "no.json: cannot be read"),
  "class": (dict(test_sets="a={}/odd"), "1 of its 2 classes .* the 12 .* e.g. 'dog'; they match"),
  "number": (dict(test_sets="a={}/high"), "2 of its 2 .* all by number, below 12"),
  "entry": (dict(test_sets="a={}/odd", test_labels="a={}/some.json"), "no list of classes for dog"),
  "value": (dict(test_sets="a={}/one", test_labels="a={}/some.json"), "has the class 12; .* to 11"),
  "list": (dict(test_sets="a={}/one", test_labels="a={}/list.json"), "files named ILSVRC2012_val"),
  "empty": (dict(test_sets="a={}/two", test_labels="a={}/some.json"), "no example has a class in"),
}


@pytest.mark.parametrize("fields, message", FURTHER.values(), ids=FURTHER)
def test_further_test_sets(twelve, tmp_path, fields, message):
  write(tmp_path, {"odd/c01/a.png": 1, "odd/dog/a.png": 1, "high/12/a.png": 1, "high/1/a.png": 1})
  write(tmp_path, {"one/c01/b.png": 1, "two/c02/c.png": 1})
  (tmp_path / "some.json").write_text('{"c01/a.png": ["c01"], "b.png": [12], "c.png": []}')
  (tmp_path / "list.json").write_text("[[1]]")
  arrays = dict(test_labels=np.arange(3), class_names=["c00", "c01", "c02"])
  for side in (8, 9):
    images = np.zeros((3, side, side, 3), np.uint8)
    np.savez(tmp_path / f"{side}.npz", test_images=images, **arrays)
  own = {name: value.format(tmp_path, tmp_path) for name, value in fields.items()}
  assert re.search(message, error(config(twelve, image_size=8, **own)))
