"""Pairs of files as arrays, and what is refused."""

import struct
import zlib

import numpy as np
from PIL import ExifTags, Image
import pytest

from mixer_jax.errors import UserError
from mixer_jax.tasks.segmentation import data, pairs, shapes
from mixer_jax.tasks.segmentation.data import SegmentationData
from tests.tasks.segmentation import files


def options(root, **fields):
  fields = dict(void=files.VOID, cache_dir=str(root / "cache")) | fields
  return SegmentationData(name="folder", dir=str(root), image_size=8, **fields)


@pytest.fixture(scope="module")
def camvid(tmp_path_factory):
  return files.write(tmp_path_factory.mktemp("camvid"), {"train": 5, "val": 2, "test": 3})


def test_pairs_belong_together_and_come_from_the_cache(camvid):
  loaded = data.load(options(camvid, validation_split="val"))
  assert {name: len(split) for name, split in loaded.splits.items()} == {
    "train": 5,
    "test": 3,
    "validation": 2,
  }
  assert loaded.class_names == ("0", "1", "2")
  for split in loaded.splits.values():
    found = split.arrays()
    assert found["image"].shape[1:] == (20, 24, 3) and found["mask"].dtype == np.uint8
    np.testing.assert_array_equal(found["image"], files.colours(found["mask"]))
  images = sorted(x.tobytes() for x in loaded.splits["train"].arrays()["image"])
  written = sorted(np.asarray(Image.open(p)).tobytes() for p in (camvid / "train").iterdir())
  assert images == written
  before = (camvid / "train/a0.png").read_bytes()
  halves = data.load(options(camvid, train_split="train[:3]", test_split="train[3:]")).splits
  assert (len(halves["train"]), len(halves["test"])) == (3, 2)
  assert len({x.tobytes() for s in halves.values() for x in s.arrays()["image"]}) == len(
    set(images)
  )
  assert before == (camvid / "train/a0.png").read_bytes()


def test_a_palette_is_not_looked_up_and_names_come_from_a_file(tmp_path):
  root = files.write(tmp_path, {"training": 4, "validation": 2}, ade=True)
  (root / "classes.txt").write_text("wall\nsky\nroad\n\n \n", encoding="utf-8-sig")
  splits = dict(train_split="training", test_split="validation")
  loaded = data.load(options(root, void=0, **splits))
  assert loaded.class_names == ("wall", "sky", "road")
  found = loaded.splits["train"].arrays()
  as_camvid = np.where(found["mask"] == 0, files.VOID, found["mask"] - 1)
  np.testing.assert_array_equal(found["image"], files.colours(as_camvid.astype(np.uint8)))
  assert set(np.unique(found["mask"])) == {0, 1, 2, 3}
  assert data.load(options(root, void=0, classes="a, b,c", **splits)).class_names == ("a", "b", "c")


def test_classes_without_a_pixel_are_told(tmp_path, camvid, caplog):
  data.load(options(camvid, classes="road,sky,boat,car"))
  assert "1 of 4 classes: car" in caplog.text
  root = files.write(tmp_path, {"train": 2, "test": 1})
  mask = np.full((20, 24), 200, np.uint8)
  mask[:4] = 10
  Image.fromarray(mask).save(root / "trainannot/a0.png")
  assert len(data.load(options(root)).class_names) == 200  # 0 to 200, without the void id
  assert "of 200 classes: " in caplog.text


def test_images_that_exif_turns_are_told(tmp_path, caplog):
  root = files.write(tmp_path, {"train": 2, "test": 1})
  data.load(options(root))
  assert not caplog.text
  turned = Image.open(root / "train/a0.png")
  exif = turned.getexif()
  exif[ExifTags.Base.Orientation] = 3  # by half a circle
  turned.save(root / "train/a0.png", exif=exif)
  data.load(options(root))
  assert "train/a0.png" in caplog.text and "EXIF" in caplog.text


def test_a_canvas_takes_pairs_of_any_size(tmp_path):
  root = files.write(tmp_path, {"train": 2, "test": 1})
  wide = np.full((20, 60, 3), 77, np.uint8)
  Image.fromarray(wide).save(root / "train/a0.png")
  Image.fromarray(wide[..., 0] % 2).save(root / "trainannot/a0.png")
  with pytest.raises(UserError, match="set data.canvas to a height and a width"):
    data.load(options(root))
  found = data.load(options(root, canvas=(10, 15))).splits["train"].arrays()
  i = int(np.argmax((found["image"][:, 0, 0] == 77).all(1)))
  assert found["image"].shape == (2, 10, 15, 3)
  assert (found["image"][i, :5] == 77).all() and (found["image"][i, 5:] == 0).all()
  assert (found["mask"][i, :5] == 1).all() and (found["mask"][i, 5:] == files.VOID).all()


def test_generated_shapes_are_a_function_of_seed_and_number():
  images, masks = shapes.make(0, 6)
  more, more_masks = shapes.make(0, 9)
  np.testing.assert_array_equal(images, more[:6])
  np.testing.assert_array_equal(masks, more_masks[:6])
  assert set(np.unique(more_masks)) == {0, 1, 2, 3, shapes.VOID}
  assert (shapes.make(1, 6)[0] != images).mean() > 0.9


@pytest.mark.parametrize("fields", [{}, dict(void=1), dict(classes="back,object")])
def test_masks_of_0_and_255_are_no_two_classes(tmp_path, fields):
  for base in ("train", "trainannot", "test", "testannot"):
    (tmp_path / base).mkdir()
    form = np.full((8, 8), 255, np.uint8) if "annot" in base else np.zeros((8, 8, 3), np.uint8)
    form[:4] = 0
    Image.fromarray(form).save(tmp_path / base / "a.png")
  with pytest.raises(UserError, match="0, 255"):
    data.load(options(tmp_path, **dict(void=255) | fields))


def saved(array, place="trainannot/a1.png"):
  return lambda root: Image.fromarray(array).save(root / place)


@pytest.mark.parametrize(
  "change, named",
  [
    (saved(np.zeros((20, 24, 3), np.uint8)), "trainannot/a1.png.*mode RGB"),
    (saved(np.zeros((20, 24), np.uint16)), "trainannot/a1.png.*mode I;16"),
    (saved(np.zeros((24, 20), np.uint8)), "trainannot/a1.png has 20x24"),
    (saved(np.full((20, 24), 7, np.uint8), "testannot/a0.png"), "testannot/a0.png.*id 7"),
    (lambda r: (r / "trainannot/a1.png").unlink(), "train/a1.png: no mask"),
    (lambda r: (r / "train/a1.png").unlink(), "trainannot/a1.png: no image"),
    (lambda r: (r / "train/a1.jpg").write_bytes(b""), "a1.*second image"),
    (lambda r: (r / "trainannot/a1.png").write_bytes(b"x"), "trainannot/a1.png: broken"),
    (lambda r: (r / "train/a1.png").write_bytes(b"x"), "train/a1.png: broken"),
    (lambda r: (r / "testannot").rename(r / "masks"), "testannot: no such folder"),
    (lambda r: (r / "classes.txt").write_bytes("Straße".encode("latin-1")), "classes.txt"),
    (lambda r: (r / "classes.txt").write_text("sky\nsky"), "classes.txt.*'sky' twice"),
    (lambda r: (r / "classes.txt").write_text("sky\n\nroad"), "classes.txt: .* class 2 of 3"),
  ],
)
def test_a_mistake_names_its_file(tmp_path, change, named):
  root = files.write(tmp_path / "set", {"train": 3, "test": 1})
  change(root)
  with pytest.raises(UserError, match=named) as error:
    data.load(options(root))
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  "fields, named",
  [
    (dict(canvas=(3,)), "data.canvas"),
    (dict(stride=9), "data.stride"),
    (dict(dir="nowhere"), "data.dir"),
    (dict(name="shapes"), "data.dir"),
    (dict(name="shapes", dir="", test_split="val"), "'val'"),
  ],
)
def test_a_mistake_names_its_field(camvid, fields, named):
  chosen = SegmentationData(**dict(name="folder", dir=str(camvid), image_size=8) | fields)
  with pytest.raises(UserError, match=named):
    chosen.check()
    data.load(chosen)


def test_a_mask_file_keeps_its_ids(tmp_path):
  ids = np.arange(256, dtype=np.uint8).reshape(16, 16)
  for name, palette in (("grey", False), ("palette", True)):
    file = Image.fromarray(ids)
    if palette:
      file.putpalette(list(range(255, -1, -1)) * 3)
    file.save(tmp_path / f"{name}.png")
    found = pairs.decode_mask((tmp_path / f"{name}.png").read_bytes(), name)
    np.testing.assert_array_equal(found, ids)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", [0, 3])
def test_a_mask_of_fewer_bits_keeps_its_ids(bits, kind):
  """Grey (0) and palette (3), written by the PNG specification: Pillow writes no grey of 2 or 4 bits."""
  chunk = lambda name, x: (
    struct.pack(">I", len(x)) + name + x + struct.pack(">I", zlib.crc32(name + x))
  )
  ids = np.arange(2**bits, dtype=np.uint8).repeat(3)  # a row may end within a byte
  row = np.packbits(np.unpackbits(ids[:, None], axis=1)[:, 8 - bits :])
  header = struct.pack(">IIBBBBB", len(ids), 1, bits, kind, 0, 0, 0)
  palette = chunk(b"PLTE", bytes(range(255, -1, -1)) * 3) if kind == 3 else b""
  body = chunk(b"IDAT", zlib.compress(b"\0" + row.tobytes())) + chunk(b"IEND", b"")
  file = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + palette + body
  np.testing.assert_array_equal(pairs.decode_mask(file, "mask"), ids[None])
