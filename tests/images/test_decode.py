"""Decoded images: every form of file, its orientation, damage and memory."""

import io
import tracemalloc

import numpy as np
from PIL import Image
import pytest

from mixer_jax.errors import UserError
from mixer_jax.images import decode
from tests.images import loading


def encoded(image, form="PNG", **options):
  file = io.BytesIO()
  image.save(file, form, **options)
  return file.getvalue()


NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (6, 8, 3), np.uint8))


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
