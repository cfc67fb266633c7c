"""Image files and folders that are broken, odd or hostile."""

import io
import shutil
import struct
import tracemalloc
import zipfile
import zlib

import numpy as np
from PIL import Image
import pytest

from mixer_jax.errors import UserError
from mixer_jax.images import decode
from tests.images import loading
from tests.images.loading import error, load


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


def encoded(image, form="PNG", **options):
  file = io.BytesIO()
  image.save(file, form, **options)
  return file.getvalue()


def png(width, height, bits=8, colour=2, rows=b""):
  """A PNG file that claims a size and holds some rows."""
  chunk = lambda kind, content: (
    struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
  )
  header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
  body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
  return b"\x89PNG\r\n\x1a\n" + body


NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (6, 8, 3), np.uint8))
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


@pytest.mark.parametrize("bit", range(8))
def test_a_png_of_damaged_pixels_is_broken(bit):
  """Each byte of the compressed pixels, with one bit of it inverted."""
  content = encoded(NOISE)
  begin, end = content.index(b"IDAT") + 4, content.index(b"IEND") - 4
  assert np.array_equal(decode.decode_image(content, "x"), np.asarray(NOISE.convert("RGB")))
  for place in range(begin, end, 97):
    damaged = bytearray(content)
    damaged[place] ^= 1 << bit
    with pytest.raises(UserError, match="^x: broken image: the checksum of its pixels is wrong$"):
      decode.decode_image(bytes(damaged), "x")


def test_bytes_after_the_end_of_a_png_do_not_count():
  content = encoded(NOISE) + b"\0\0\0\1IDATx\0\0\0\0"
  decode.decode_image(content, "x")


# Mode: how a file of it is made from a red and a blue half, and what it then shows.
RED_BLUE = Image.new("RGB", (4, 2), (255, 0, 0))
RED_BLUE.paste((0, 0, 255), (2, 0, 4, 2))
COLOURS = [[255, 0, 0], [0, 0, 255]]
GREYS = [[76, 76, 76], [29, 29, 29]]  # ITU-R 601 luma of the two


@pytest.mark.parametrize(
  "content, expected",
  [
    (encoded(RED_BLUE), COLOURS),
    (encoded(RED_BLUE.quantize(4)), COLOURS),
    (encoded(RED_BLUE.quantize(4), transparency=b"\x80\x40"), COLOURS),
    (encoded(RED_BLUE.convert("RGBA")), COLOURS),
    (encoded(RED_BLUE.convert("L")), GREYS),
    (encoded(RED_BLUE.convert("LA")), GREYS),
    (encoded(RED_BLUE.convert("L").point(lambda v: 255 * (v > 50), "1")), [[255] * 3, [0] * 3]),
    (encoded(RED_BLUE, "BMP"), COLOURS),
    (encoded(RED_BLUE.quantize(4), "BMP"), COLOURS),
    (encoded(RED_BLUE, "WEBP", lossless=True), COLOURS),
    (encoded(RED_BLUE, "WEBP", lossless=True, save_all=True,
             append_images=[Image.new("RGB", (4, 2))]), COLOURS),
    (encoded(RED_BLUE, save_all=True, append_images=[Image.new("RGB", (4, 2))]), COLOURS),
    (encoded(RED_BLUE.resize((32, 16), 0).convert("CMYK"), "JPEG", quality=100), COLOURS),
    (encoded(Image.fromarray(np.array([[76 * 257, 29 * 257]], np.uint16))), GREYS),
  ],
)  # fmt: skip
def test_every_mode_becomes_rgb(content, expected):
  image = decode.decode_image(content, "x")
  middle = image.shape[0] // 2
  np.testing.assert_allclose(image[middle, [0, -1]], expected, atol=3)
  assert image.dtype == np.uint8 and image.shape[2] == 3


def test_every_orientation_of_exif():
  """The eight ways in which a camera may be held, as the standard defines them."""
  upright = np.random.default_rng(1).integers(0, 256, (3, 5, 3), np.uint8)
  stored = {
    1: upright, 2: upright[:, ::-1], 3: upright[::-1, ::-1], 4: upright[::-1],
    5: upright.swapaxes(0, 1), 6: np.rot90(upright), 7: upright[::-1, ::-1].swapaxes(0, 1),
    8: np.rot90(upright, -1),
  }  # fmt: skip
  for orientation, pixels in stored.items():
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encoded(Image.fromarray(np.ascontiguousarray(pixels)), exif=exif)
    np.testing.assert_array_equal(decode.decode_image(content, "x"), upright, str(orientation))


def test_sixteen_bits_take_no_multiple_of_the_memory():
  content = encoded(Image.fromarray(np.zeros((1000, 1000), np.uint16)))
  tracemalloc.start()
  decode.decode_image(content, "x")
  _, peak = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  assert peak < 9e6  # bytes, of a million pixels


def test_images_that_do_not_fit_into_memory():
  records = loading.Records(10**12, lambda: encoded(Image.new("RGB", (900, 900))))
  with pytest.raises(UserError, match="0.png: 1,000,000,000,000 images of 900x900 pixels .*stored"):
    decode.decode_all(records, Image.Image.copy, lambda _, shape, dtype: np.empty(shape, dtype))


def one_class(root):
  for split in "train", "test":
    shutil.rmtree(root / split / "dog")


def loop(root):
  (root / "train" / "bird").symlink_to(root / "train" / "bird")


def looped_image(root):
  (root / "train" / "cat" / "2.png").symlink_to("2.png")


def dangling(root):
  (root / "train" / "cat" / "2.png").symlink_to("nothing.png")


def upwards(root):
  (root / "train" / "bird").symlink_to(root)


def file_as_split(root):
  shutil.rmtree(root / "test")
  (root / "test").write_text("")


def file_as_root(root):
  shutil.rmtree(root)
  root.write_text("")


@pytest.mark.parametrize(
  "spoil, place, message",
  [
    (one_class, "", "has only the class 'cat'; allowed: two or more"),
    (loop, "train/bird", "cannot be read: Too many levels of symbolic links"),
    (looped_image, "cat/2.png", "cannot be read: Too many levels of symbolic links"),
    (dangling, "cat/2.png", "cannot be read: No such file or directory"),
    (upwards, "train/bird", "no images in this class folder"),
    (file_as_split, "root/test", "no such folder"),
    (file_as_root, "root", "no such folder"),
  ],
)
def test_a_folder_that_is_no_data_set(root, spoil, place, message):
  spoil(root)
  line = error(config(root))
  assert message in line and place in line


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
  assert loose == f"{root / 'test'}: images beside its class folders are not read: 1"
  assert inner.startswith(f"{root / 'train' / 'cat' / 'images.png'}: not read")
  assert empty.startswith(f"{root / 'test' / 'dog'}: no images in this class folder")


def archive(path, **members):
  with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
    for name, content in members.items():
      file.writestr(f"{name}.npy", content)


def npy(array):
  file = io.BytesIO()
  np.save(file, array)
  return file.getvalue()


def test_a_file_that_is_not_there_is_named_in_full(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(UserError, match="data.dir='d/a.npz' is no file"):
    load(loading.config(name="npz", dir="d/a.npz"))


IMAGES, LABELS = npy(np.zeros((4, 2, 3, 3), np.uint8)), npy(np.arange(4) % 2)


@pytest.mark.parametrize(
  "changes, message",
  [
    (dict(train_images=IMAGES[:-5]), "'train_images' cannot be read: train_images has 67 bytes"),
    (dict(train_images=IMAGES.replace(b"(4, 2", b"(9, 2")), "has 72 bytes, not those of"),
    (dict(train_images=IMAGES.replace(b"(4, ", b"(-4,")), "cannot be read"),
    (dict(train_images=b"\x80\x04K\x01."), "cannot be read"),
    (dict(train_images=npy(np.array([{}], object))), "Object arrays cannot be loaded"),
    (dict(train_labels=npy(np.array([0, 1, 2**32, 1]))), "labels run from 0 to 4294967296"),
    (dict(train_labels=npy(np.array([0, 1, -(2**32), 1]))), "labels run from -4294967296 to 1"),
    (dict(train_labels=npy(np.zeros(4, int)), test_labels=npy(np.zeros(4, int))), "only the class"),
    (dict(class_names=npy(np.array([b"\xff\xfe", b"a"]))), "class_names is not UTF-8"),
    (
      dict(class_names=npy(np.array(["crane", "boat", "crane"]))),
      "class_names has 'crane' 2 times",
    ),
  ],
)
def test_an_npz_that_is_no_data_set(tmp_path, changes, message):
  members = dict(train_images=IMAGES, train_labels=LABELS, test_images=IMAGES, test_labels=LABELS)
  archive(tmp_path / "a.npz", **members | changes)
  fields = config(tmp_path, name="npz", dir=str(tmp_path / "a.npz"))
  assert message in error(fields)


def test_an_npz_without_a_path(tmp_path):
  assert (
    error(config(tmp_path, name="npz", dir="")) == "data.dir='' is no file; set it to the .npz file"
  )


def test_an_encrypted_npz(tmp_path):
  archive(tmp_path / "a.npz", train_images=IMAGES, train_labels=LABELS)
  content = (tmp_path / "a.npz").read_bytes()
  # Bit 0 of the flags, in the local headers and in the directory.
  content = content.replace(b"PK\x03\x04\x14\x00\x00", b"PK\x03\x04\x14\x00\x01")
  content = content.replace(b"PK\x01\x02\x14\x03\x14\x00\x00", b"PK\x01\x02\x14\x03\x14\x00\x01")
  (tmp_path / "a.npz").write_bytes(content)
  assert "encrypted" in error(config(tmp_path, name="npz", dir=str(tmp_path / "a.npz")))
