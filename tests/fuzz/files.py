"""The files to begin with, and their readers."""

import contextlib
import functools
import gzip
import io
import json
import lzma
import pathlib
import pickle
import shutil
import struct
import tempfile
from typing import Any, Callable, Iterator, NamedTuple
import zipfile

from flax import traverse_util
import jax
from ml_dtypes import bfloat16
import numpy as np
from PIL import Image

from mixer_jax import pretrained
from mixer_jax.data import tfrecord
from mixer_jax.errors import UserError
from mixer_jax.images import cifar_files, crops, decode, sources
from mixer_jax.images.image_data import ImageData
from mixer_jax.models import mixer
from mixer_jax.pde import function_files
from mixer_jax.text.documents import documents
from mixer_jax.text.records import rows
from mixer_jax.text.subwords import Subwords
from mixer_jax.text.vocabulary import SPECIAL, Vocabulary
from tests.fuzz import mutations
from tests.images import loading
from tests.pretrained import pytorch_files


class Fault(BaseException):
  """A forbidden result of a reader; no `except Exception` in it hides that."""


class Seed(NamedTuple):
  """A valid file, its reader, which is told whether no checksum was mended, and maybe a mutation
  within the container."""

  content: bytes
  read: Callable[[pathlib.Path, bool], None]
  inside: Callable[[np.random.Generator, bytes], bytes] | None = None


SIZES = dict(hidden_dim=4, num_blocks=1, tokens_mlp_dim=4, channels_mlp_dim=4)
MODEL = mixer.Mixer(num_classes=3, patch_size=4, **SIZES)
RNG = np.random.default_rng(0)


@functools.cache
def params():
  template = jax.eval_shape(MODEL.init, jax.random.key(0), np.zeros((1, 8, 8, 3)))["params"]
  return jax.tree.map(lambda x: RNG.normal(0, 0.1, x.shape).astype(np.float32), template)


@functools.cache
def arrays() -> dict[str, np.ndarray]:
  return traverse_util.flatten_dict(params(), sep="/")


def _file(write: Callable[..., Any], *args: Any, **options: Any) -> bytes:
  """The bytes that a function writes into a file."""
  write(file := io.BytesIO(), *args, **options)
  return file.getvalue()


def _at_path(write: Callable[[pathlib.Path], Any]) -> bytes:
  with tempfile.TemporaryDirectory() as directory:
    write(path := pathlib.Path(directory, "w.npz"))
    return path.read_bytes()


def _safetensors(dtype: Any, kind: str) -> bytes:
  header, content = {"__metadata__": {"format": "pt"}}, b""
  for name, array in arrays().items():
    begin = len(content)
    content += array.astype(dtype).tobytes()
    header[name] = dict(dtype=kind, shape=array.shape, data_offsets=[begin, len(content)])
  text = json.dumps(header).encode()
  return struct.pack("<Q", len(text)) + text + content


def _cifar() -> bytes:
  """Pickled by Python 3 with the names that Python 2 has for NumPy's classes."""
  images = RNG.integers(0, 255, (3, 3072), np.uint8)
  batch = pickle.dumps({b"data": images, b"labels": [3, 1, 2]}, 3)
  return batch.replace(b"numpy._core.", b"numpy.core.")


TFRECORDS = [b"one", b"", b"three" * 100]


def _tfrecord() -> bytes:
  parts = [part for content in TFRECORDS for part in (struct.pack("<Q", len(content)), content)]
  return b"".join(part + tfrecord.masked_crc(part) for part in parts)


def _image(form: str, mode: str = "RGB", **options: Any) -> bytes:
  image = Image.fromarray(RNG.integers(0, 255, (9, 12, 3), np.uint8))
  image = image.quantize(8) if mode == "P" else image.convert(mode)
  return _file(lambda file: image.save(file, form, **options))


def _texts() -> dict[str, bytes]:
  """Texts and tables by the ending of their files."""
  rows = [("label", "sentence"), *((str(i), f'"crème {i}"') for i in range(8))]
  table = lambda separator: "".join(separator.join(row) + "\n" for row in rows).encode()
  parts = [json.dumps({"label": i, "sentence": f"\U0001f3ac film {i}"}) for i in range(8)]
  lines = "\n".join(parts).encode()
  return {
    ".txt.xz": lzma.compress("crème\nbrûlée\n".encode()),
    ".tsv": table("\t"),
    ".csv": table(","),
    ".jsonl": lines,
    ".jsonl.gz": gzip.compress(lines, mtime=0),
  }


def read_weights(path: pathlib.Path, outer: bool) -> None:
  """Reads and fits weights, as fine-tuning does."""
  weights, original = pretrained.read(str(path)), arrays()
  for name, array in weights.arrays.items():
    if array.dtype != np.float32 or not np.isfinite(array).all():
      raise Fault(f"{name} is read as {array.dtype}, or not finite")
    # Members of an archive have checksums: changed bytes are not read.
    archived = outer and zipfile.is_zipfile(path) and name in original
    if archived and not np.array_equal(array, original[name]):
      raise Fault(f"{name} is read with other numbers than were written")
  _ = weights.num_classes, weights.num_tokens, weights.patch_size
  for resize in ("", "block_diagonal", "interpolate_bilinear"):
    with contextlib.suppress(UserError):
      weights.model_fields(16, resize)
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params())
  if jax.tree.map(np.shape, weights.fit(shapes)) != jax.tree.map(np.shape, params()):
    raise Fault("the fitted parameters have other shapes")


def read_image(path: pathlib.Path, _: bool) -> None:
  records = loading.Records(1, path.read_bytes)
  square = functools.partial(crops.fitted, size=5, fit="crop")
  for fit in (Image.Image.copy, square):
    allocate = lambda _, shape, dtype: np.empty(shape, dtype)
    image = decode.decode_all(records, fit, allocate)["images"][0]
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
      raise Fault(f"an image becomes {image.dtype} {image.shape}")
    if fit is square and image.shape != (5, 5, 3):
      raise Fault(f"a stored image has the shape {image.shape}")


def read_data(path: pathlib.Path, _: bool) -> None:
  loaded = sources.load(ImageData(name="npz", dir=str(path), test_split="test[:50%]"))
  _check_examples(loaded.splits["train"].arrays(), len(loaded.class_names))


@contextlib.contextmanager
def _named(path: pathlib.Path, ending: str) -> Iterator[str]:
  """A copy of a file whose ending says what kind of file it is."""
  copy = path.with_name(f"case{ending}")
  try:
    shutil.copyfile(path, copy)
    yield str(copy)
  finally:
    copy.unlink()


def read_functions(path: pathlib.Path, _: bool) -> None:
  with _named(path, ".npz") as name:
    found = function_files.read(name)
  for array in (found.inputs, found.outputs):
    if array.dtype not in (np.float32, np.float64) or not np.isfinite(array).all():
      raise Fault(f"functions are read as {array.dtype}, or not finite")


def read_cifar(path: pathlib.Path, _: bool) -> None:
  """A test batch in a folder of its own, where ten images are a whole batch."""
  known = cifar_files.FORMATS["cifar10"]
  with tempfile.TemporaryDirectory(dir=path.parent) as name:
    folder = pathlib.Path(name)
    names = {known.names.encode(): [b"%d" % i for i in range(10)]}
    (folder / known.meta).write_bytes(pickle.dumps(names, 3))
    for file in (*known.files["train"], *known.files["test"]):
      shutil.copyfile(path, folder / file)
    reader = cifar_files.CifarFiles("cifar10", folder)
    reader._known = known._replace(images={"train": 3, "test": 3})
    base = reader.read("test")
    _check_examples({"image": base.images, "label": base.labels}, 1 << 31)


def _check_examples(examples: Any, num_classes: int) -> None:
  images, labels = examples["image"], examples["label"]
  if images.dtype != np.uint8 or not 0 <= labels.min() <= labels.max() < num_classes:
    raise Fault("an image or label is not what it must be")


def read_tfrecord(path: pathlib.Path, _: bool) -> None:
  try:
    records = tfrecord.TfRecords([path], [3])
    found = [records[i] for i in range(3)]
  except ValueError as e:  # `tfds_source` makes a line of it
    raise UserError(str(e)) from e
  if found != TFRECORDS:
    raise Fault("other records are read than were written")


def read_vocabulary(path: pathlib.Path, _: bool) -> None:
  vocabulary = Vocabulary.read(path)
  (ids,) = vocabulary.encode(["a film about [MASK] crème"])
  if not (ids < vocabulary.size).all() or vocabulary.mask not in ids:
    raise Fault("ids lie outside of the vocabulary")


def read_byte_pairs(path: pathlib.Path, _: bool) -> None:
  vocabulary, text = Subwords.read(path), "crème </s> brûlée"
  (ids,) = vocabulary.encode([text])
  if not (ids < vocabulary.size).all() or vocabulary.decode(ids) != text:
    raise Fault("a text does not come back, or ids lie outside of the vocabulary")


def read_text(path: pathlib.Path, _: bool, ending: str) -> None:
  """Documents, and the rows of a table."""
  with _named(path, ending) as name:
    found = [list(documents(name, "sentence"))]
    if not ending.startswith(".txt"):
      table = rows(name, "sentence")
      found += [table.texts, table.labels]
    if not all(isinstance(text, str) and text for texts in found for text in texts):
      raise Fault("an empty text")


def seeds() -> dict[str, Seed]:
  """All kinds of files; those of PyTorch where it is installed."""
  unit = pretrained.Normalization((0.5,) * 3, (0.5,) * 3)
  functions = {"a": RNG.normal(size=(3, 8)), "u": RNG.normal(size=(3, 8)).astype(np.float32)}
  images = RNG.integers(0, 255, (4, 3, 2, 3), np.uint8)
  sets = {f"{split}_images": images for split in ("train", "test")}
  sets |= {f"{split}_labels": np.arange(4) % 2 for split in ("train", "test")}
  exif = Image.Exif()
  exif[0x0112], exif[0x010E] = 6, "turned"
  grey = Image.fromarray(np.arange(70, dtype=np.uint16).reshape(7, 10) * 900)
  weights = {
    "npz": _file(np.savez, **arrays()),
    "npz, compressed": _file(np.savez_compressed, **arrays()),
    "npz, saved here": _at_path(lambda path: pretrained.save(path, params(), MODEL, unit)),
  }
  kinds = {"": ("<f4", "F32"), ", float16": ("<f2", "F16"), ", bfloat16": (bfloat16, "BF16")}
  pngs = {
    "png": _image("PNG"),
    "png, palette": _image("PNG", "P", transparency=1),
    "png, 16 bit": _file(grey.save, "PNG"),
    "png, grey and alpha": _image("PNG", "LA"),
  }
  other_images = {
    "jpeg": _image("JPEG", exif=exif),
    "jpeg, progressive cmyk": _image("JPEG", "CMYK", progressive=True),
    "webp": _image("WEBP"),
    "bmp": _image("BMP"),
  }
  words = "\n".join([*SPECIAL, *"abcé", "##f"]).encode()
  pairs = _at_path(lambda path: Subwords.train(["crème brûlée"] * 2, 262).save(path))
  data = _file(np.savez, **sets, class_names=np.array(["cat", "dog"]))
  found = {
    **{k: Seed(v, read_weights, mutations.inside_zip) for k, v in weights.items()},
    **{
      f"safetensors{k}": Seed(_safetensors(*v), read_weights, mutations.inside_safetensors)
      for k, v in kinds.items()
    },
    "data npz": Seed(data, read_data, mutations.inside_zip),
    "functions npz": Seed(_file(np.savez, **functions), read_functions, mutations.inside_zip),
    "CIFAR's pickle": Seed(_cifar(), read_cifar),
    "TFRecord": Seed(_tfrecord(), read_tfrecord),
    **{k: Seed(v, read_image, mutations.inside_png) for k, v in pngs.items()},
    **{k: Seed(v, read_image) for k, v in other_images.items()},
    "vocabulary": Seed(words, read_vocabulary),
    "byte pairs": Seed(pairs, read_byte_pairs),
    **{k: Seed(v, functools.partial(read_text, ending=k)) for k, v in _texts().items()},
  }
  state = {"model": {k: pytorch_files.Tensor(v) for k, v in arrays().items()}}
  found["pth"] = Seed(pytorch_files.content(state), read_weights, mutations.inside_zip)
  old = pytorch_files.content(state, before_archives=True)
  return found | {"pth before 1.6": Seed(old, read_weights)}
