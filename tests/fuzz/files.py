"""The files to begin with, and their readers."""

import contextlib
import dataclasses
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
from typing import Callable
import zipfile

import jax
import ml_dtypes
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


class Fault(BaseException):
  """A forbidden result of a reader; no `except Exception` in it hides that."""


def model() -> mixer.Mixer:
  return mixer.Mixer(
    num_classes=3, patch_size=4, hidden_dim=4, num_blocks=1, tokens_mlp_dim=4, channels_mlp_dim=4
  )


@functools.cache
def template():
  """Shapes of the parameters of `model` on images of 8x8."""
  return jax.eval_shape(model().init, jax.random.key(0), np.zeros((1, 8, 8, 3)))["params"]


@functools.cache
def params():
  rng = np.random.default_rng(0)
  return jax.tree.map(lambda x: rng.normal(0, 0.1, x.shape).astype(np.float32), template())


def arrays() -> dict[str, np.ndarray]:
  flat = jax.tree_util.tree_leaves_with_path(params())
  return {"/".join(key.key for key in path): leaf for path, leaf in flat}


def _npz(savez) -> bytes:
  file = io.BytesIO()
  savez(file, **arrays())
  return file.getvalue()


def _saved() -> bytes:
  with tempfile.TemporaryDirectory() as directory:
    path = pathlib.Path(directory, "w.npz")
    pretrained.save(path, params(), model(), pretrained.Normalization((0.5,) * 3, (0.5,) * 3))
    return path.read_bytes()


def _safetensors(dtype="<f4", kind="F32") -> bytes:
  header, content = {"__metadata__": {"format": "pt"}}, b""
  for name, array in arrays().items():
    begin = len(content)
    content += array.astype(dtype).tobytes()
    header[name] = dict(dtype=kind, shape=array.shape, data_offsets=[begin, len(content)])
  text = json.dumps(header).encode()
  return struct.pack("<Q", len(text)) + text + content


def _torch(**options) -> bytes:
  import torch

  file = io.BytesIO()
  torch.save({"model": {k: torch.tensor(v) for k, v in arrays().items()}}, file, **options)
  return file.getvalue()


def _data() -> bytes:
  rng, file = np.random.default_rng(0), io.BytesIO()
  images = rng.integers(0, 255, (4, 3, 2, 3), np.uint8)
  labels = np.arange(4) % 2
  np.savez(file, train_images=images, train_labels=labels, test_images=images,
           test_labels=labels, class_names=np.array(["cat", "dog"]))  # fmt: skip
  return file.getvalue()


def _functions(save) -> bytes:
  file, rng = io.BytesIO(), np.random.default_rng(0)
  save(file, {"a": rng.normal(size=(3, 8)), "u": rng.normal(size=(3, 8)).astype(np.float32)})
  return file.getvalue()


def _cifar() -> bytes:
  """Pickled by Python 3 with the names that Python 2 has for NumPy's classes."""
  images = np.random.default_rng(0).integers(0, 255, (3, 3072), np.uint8)
  batch = pickle.dumps({b"data": images, b"labels": [3, 1, 2]}, 3)
  return batch.replace(b"numpy._core.", b"numpy.core.")


TFRECORDS = [b"one", b"", b"three" * 100]


def _tfrecord() -> bytes:
  parts = []
  for content in TFRECORDS:
    length = struct.pack("<Q", len(content))
    for part in (length, content):
      parts += [part, tfrecord.masked_crc(part)]
  return b"".join(parts)


def _image(form: str, mode: str = "RGB", **options) -> bytes:
  rng, file = np.random.default_rng(0), io.BytesIO()
  image = Image.fromarray(rng.integers(0, 255, (9, 12, 3), np.uint8))
  image = image.quantize(8) if mode == "P" else image.convert(mode)
  image.save(file, form, **options)
  return file.getvalue()


def _grey16() -> bytes:
  file = io.BytesIO()
  Image.fromarray(np.arange(70, dtype=np.uint16).reshape(7, 10) * 900).save(file, "PNG")
  return file.getvalue()


def _with_exif() -> bytes:
  exif = Image.Exif()
  exif[0x0112], exif[0x010E] = 6, "turned"
  return _image("JPEG", exif=exif)


def _table(separator: str) -> bytes:
  lines = [("label", "sentence"), *((str(i), f'"crème {i}"') for i in range(8))]
  return "".join(separator.join(line) + "\n" for line in lines).encode()


def _jsonl() -> bytes:
  parts = [json.dumps({"label": i, "sentence": f"\U0001f3ac film {i}"}) for i in range(8)]
  return "\n".join(parts).encode()


def read_weights(path: pathlib.Path, outer: bool) -> None:
  """Reads and fits weights, as fine-tuning does."""
  weights = pretrained.read(str(path))
  original = arrays()
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
  fitted = weights.fit(template())
  if jax.tree.map(np.shape, fitted) != jax.tree.map(lambda x: x.shape, template()):
    raise Fault("the fitted parameters have other shapes")


def read_image(path: pathlib.Path, outer: bool) -> None:
  del outer
  records = loading.Records(1, path.read_bytes)
  square = functools.partial(crops.square, side=5, fit="crop")
  for fit in (Image.Image.copy, square):
    allocate = lambda _, shape, dtype: np.empty(shape, dtype)
    image = decode.decode_all(records, fit, allocate)["images"][0]
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
      raise Fault(f"an image becomes {image.dtype} {image.shape}")
    if fit is square and image.shape != (5, 5, 3):
      raise Fault(f"a stored image has the shape {image.shape}")


def read_data(path: pathlib.Path, outer: bool) -> None:
  del outer
  loaded = sources.load(ImageData(name="npz", dir=str(path), test_split="test[:50%]"))
  _check_examples(loaded.splits["train"].arrays(), len(loaded.class_names))


def read_functions(path: pathlib.Path, outer: bool, ending: str) -> None:
  """Pairs of functions; the ending says what kind of file it is."""
  del outer
  named = path.with_name(f"case{ending}")
  try:
    named.write_bytes(path.read_bytes())
    found = function_files.read(str(named))
  finally:
    named.unlink()
  for array in (found.inputs, found.outputs):
    if array.dtype not in (np.float32, np.float64) or not np.isfinite(array).all():
      raise Fault(f"functions are read as {array.dtype}, or not finite")


def read_cifar(path: pathlib.Path, outer: bool) -> None:
  """A test batch in a folder of its own, where ten images are a whole batch."""
  del outer
  known = cifar_files.FORMATS["cifar10"]
  folder = pathlib.Path(tempfile.mkdtemp(dir=path.parent))
  try:
    names = {known.names.encode(): [b"%d" % i for i in range(10)]}
    (folder / known.meta).write_bytes(pickle.dumps(names, 3))
    for file in (*known.files["train"], *known.files["test"]):
      (folder / file).write_bytes(path.read_bytes())
    base = cifar_files.CifarFiles("cifar10", folder).read("test")
    _check_examples({"image": base.images, "label": base.labels}, 1 << 31)
  finally:
    shutil.rmtree(folder)


def read_tfrecord(path: pathlib.Path, outer: bool) -> None:
  del outer
  try:
    records = tfrecord.TfRecords([path], [3])
    found = [records[i] for i in range(3)]
  except ValueError as e:  # `tfds_source` makes a line of it
    raise UserError(str(e)) from e
  if found != TFRECORDS:
    raise Fault("other records are read than were written")


def read_vocabulary(path: pathlib.Path, outer: bool) -> None:
  del outer
  vocabulary = Vocabulary.read(path)
  (ids,) = vocabulary.encode(["a film about [MASK] crème"])
  if not (ids < vocabulary.size).all() or vocabulary.mask not in ids:
    raise Fault("ids lie outside of the vocabulary")


def read_byte_pairs(path: pathlib.Path, outer: bool) -> None:
  del outer
  vocabulary, text = Subwords.read(path), "crème </s> brûlée"
  (ids,) = vocabulary.encode([text])
  if not (ids < vocabulary.size).all() or vocabulary.decode(ids) != text:
    raise Fault("a text does not come back, or ids lie outside of the vocabulary")


def read_text(path: pathlib.Path, outer: bool, ending: str) -> None:
  """Documents, and the rows of a table; the ending says what kind of file it is."""
  del outer
  named = path.with_name(f"case{ending}")
  try:
    named.write_bytes(path.read_bytes())
    found = [list(documents(str(named), "sentence"))]
    if not ending.startswith(".txt"):
      table = rows(str(named), "sentence")
      found += [table.texts, table.labels]
    if not all(isinstance(text, str) and text for texts in found for text in texts):
      raise Fault("an empty text")
  finally:
    named.unlink()


def _check_examples(examples, num_classes: int) -> None:
  images, labels = examples["image"], examples["label"]
  if images.dtype != np.uint8 or not 0 <= labels.min() <= labels.max() < num_classes:
    raise Fault("an image or label is not what it must be")


@dataclasses.dataclass(frozen=True)
class Seed:
  """A valid file.

  Attributes:
    content: its bytes.
    read: its reader, told the path and whether the mutation mended no checksum.
    inside: mutates within the container, or None.
  """

  content: bytes
  read: Callable[[pathlib.Path, bool], None]
  inside: Callable[[np.random.Generator, bytes], bytes] | None = None


def _byte_pairs() -> bytes:
  with tempfile.TemporaryDirectory() as directory:
    path = pathlib.Path(directory, "bpe.json")
    Subwords.train(["crème brûlée"] * 2, 262).save(path)
    return path.read_bytes()


def _texts() -> dict[str, Seed]:
  contents = {
    ".txt.xz": lzma.compress("crème\nbrûlée\n".encode()),
    ".tsv": _table("\t"),
    ".csv": _table(","),
    ".jsonl": _jsonl(),
    ".jsonl.gz": gzip.compress(_jsonl(), mtime=0),
  }
  return {k: Seed(v, functools.partial(read_text, ending=k)) for k, v in contents.items()}


def seeds() -> dict[str, Seed]:
  """All kinds of files; those of PyTorch where it is installed."""
  found = {
    "npz": Seed(_npz(np.savez), read_weights, mutations.inside_zip),
    "npz, compressed": Seed(_npz(np.savez_compressed), read_weights, mutations.inside_zip),
    "npz, saved here": Seed(_saved(), read_weights, mutations.inside_zip),
    "safetensors": Seed(_safetensors(), read_weights, mutations.inside_safetensors),
    "safetensors, float16": Seed(
      _safetensors("<f2", "F16"), read_weights, mutations.inside_safetensors
    ),
    "safetensors, bfloat16": Seed(
      _safetensors(ml_dtypes.bfloat16, "BF16"), read_weights, mutations.inside_safetensors
    ),
    "data npz": Seed(_data(), read_data, mutations.inside_zip),
    "functions npz": Seed(
      _functions(lambda file, arrays: np.savez(file, **arrays)),
      functools.partial(read_functions, ending=".npz"),
      mutations.inside_zip,
    ),
    "CIFAR's pickle": Seed(_cifar(), read_cifar),
    "TFRecord": Seed(_tfrecord(), read_tfrecord),
    "png": Seed(_image("PNG"), read_image, mutations.inside_png),
    "png, palette": Seed(_image("PNG", "P", transparency=1), read_image, mutations.inside_png),
    "png, 16 bit": Seed(_grey16(), read_image, mutations.inside_png),
    "png, grey and alpha": Seed(_image("PNG", "LA"), read_image, mutations.inside_png),
    "jpeg": Seed(_with_exif(), read_image),
    "jpeg, progressive cmyk": Seed(_image("JPEG", "CMYK", progressive=True), read_image),
    "webp": Seed(_image("WEBP"), read_image),
    "bmp": Seed(_image("BMP"), read_image),
    "vocabulary": Seed("\n".join([*SPECIAL, *"abcé", "##f"]).encode(), read_vocabulary),
    "byte pairs": Seed(_byte_pairs(), read_byte_pairs),
    **_texts(),
  }
  try:
    found["pth"] = Seed(_torch(), read_weights, mutations.inside_zip)
    old = _torch(_use_new_zipfile_serialization=False)
    found["pth before 1.6"] = Seed(old, read_weights)
  except ImportError:
    pass
  return found
