"""CIFAR's archives, written here as Python 2 wrote them, opcode by opcode."""

import hashlib
import io
import pathlib
import pickle
import struct
import tarfile

import numpy as np
import pytest

from mixer_jax.images import cifar_files
from tests.images import loading
from tests.images.loading import error, load


def text(value: bytes) -> bytes:
  return b"U" + bytes([len(value)]) + value if len(value) < 256 else b"T" + struct.pack("<i", len(value)) + value  # fmt: skip


def dictionary(**items: bytes) -> bytes:
  """Protocol 2 as the cPickle module of Python 2 writes it."""
  body = b"".join(text(key.encode()) + value for key, value in items.items())
  return b"\x80\x02}q\x01(" + body + b"u."


def listed(items) -> bytes:
  return b"](" + b"".join(items) + b"e"


def array(x: np.ndarray) -> bytes:
  made = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
  shape = b"".join(b"M" + struct.pack("<H", n) for n in x.shape) + b"\x86"
  dtype = (
    b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
  )
  return made + b"(K\x01" + shape + dtype + b"\x89" + text(x.tobytes()) + b"tb"


def batch(images: np.ndarray, labels: np.ndarray, key: str) -> bytes:
  planes = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
  own = {key: listed(b"K" + bytes([y]) for y in labels.tolist()), "data": array(planes)}
  names = listed(text(b"cat_s_%06d.png" % i) for i in range(len(images)))
  return dictionary(batch_label=text(b"a batch"), filenames=names, **own)


@pytest.fixture(params=["cifar10", "cifar100"])
def made(request):
  """A small set of a kind: its name, files by path, images and labels."""
  name, rng = request.param, np.random.default_rng(0)
  known = cifar_files.FORMATS[name]
  counts = {"train": 20 // len(known.files["train"]), "test": 6}
  classes = int(name.removeprefix("cifar"))
  names = listed(text(b"class%d" % i) for i in range(classes))
  files, expected = {known.meta: dictionary(**{known.names: names})}, {}
  for base, paths in known.files.items():
    images = rng.integers(0, 256, (len(paths) * counts[base], 32, 32, 3), np.uint8)
    labels = rng.integers(0, classes, len(images))
    expected[base] = images, labels
    for i, path in enumerate(paths):
      part = slice(i * counts[base], (i + 1) * counts[base])
      files[path] = batch(images[part], labels[part], known.labels)
  return name, {f"{known.folder}/{path}": content for path, content in files.items()}, expected


def archive(path: pathlib.Path, files: dict[str, bytes]) -> pathlib.Path:
  with tarfile.open(path, "w:gz") as file:
    for name, content in files.items():
      member = tarfile.TarInfo(name)
      member.size = len(content)
      file.addfile(member, io.BytesIO(content))
  return path


def config(name, path, **fields):
  return loading.config(name=name, dir=str(path), **fields)


def test_the_writer_here_writes_pickles(made):
  _name, files, expected = made
  first = next(content for path, content in files.items() if "train" in path or "_1" in path)
  found = pickle.loads(first, encoding="bytes")
  np.testing.assert_array_equal(
    found[b"data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1),
    expected["train"][0][: len(found[b"data"])],
  )


def test_archive_and_folder_hold_the_same_images(made, tmp_path):
  name, files, expected = made
  packed = archive(tmp_path / "a.tar.gz", files)
  for path, content in files.items():
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).write_bytes(content)
  folder = tmp_path / next(iter(files)).partition("/")[0]
  for place in (packed, folder, tmp_path):
    found = load(config(name, place))
    assert found.class_names == tuple(f"class{i}" for i in range(int(name.removeprefix("cifar"))))
    for base, (images, labels) in expected.items():
      split = getattr(found, base)
      np.testing.assert_array_equal(split.images, images)
      np.testing.assert_array_equal(split.labels, labels)
  part = load(config(name, packed, train_split="train[:50%]", validation_split="train[50%:]"))
  both = np.concatenate([part.train.images, part.validation.images])
  assert len({x.tobytes() for x in both}) == len(expected["train"][0])


def test_batches_that_numpy_2_pickled_again_are_read(made, tmp_path):
  name, files, expected = made
  for path, content in files.items():
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).write_bytes(pickle.dumps(pickle.loads(content, encoding="bytes"), protocol=4))
  found = load(config(name, tmp_path))
  for base, (images, labels) in expected.items():
    np.testing.assert_array_equal(getattr(found, base).images, images)
    np.testing.assert_array_equal(getattr(found, base).labels, labels)


def test_an_archive_of_another_sum_is_told(made, tmp_path, caplog, monkeypatch):
  name, files, _ = made
  path = archive(tmp_path / "a.tar.gz", files)
  load(config(name, path))
  found = hashlib.md5(path.read_bytes()).hexdigest()
  known = cifar_files.FORMATS[name]
  line = f"{path}: MD5 {found}, not {known.md5} of the published archive"
  assert line in caplog.messages
  caplog.clear()
  monkeypatch.setitem(cifar_files.FORMATS, name, known._replace(md5=found))
  load(config(name, path, train_split="train[:60%]"))
  assert not caplog.messages


def test_a_truncated_archive_is_told(made, tmp_path):
  name, files, _ = made
  path = archive(tmp_path / "a.tar.gz", files)
  path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
  assert f"{path}: cannot be read" in error(config(name, path))
  some = {k: v for k, v in files.items() if "test" not in k}
  assert "lacks test" in error(config(name, archive(path, some)))


def spoiled(files, spoil):
  """The files with the last one changed, which is of the test split."""
  path = next(path for path in files if "test" in path)
  return files | {path: spoil(files[path])}


class Sprung:
  def __reduce__(self):
    return pathlib.Path("sprung").write_text, ("",)


@pytest.mark.parametrize(
  "spoil, message",
  [
    (lambda x: x[:-10], "cannot be read"),
    (lambda x: b"", "cannot be read"),
    (lambda x: pickle.dumps(Sprung(), 2) + x, "it names"),
    (lambda x: b"cos\nsystem\n(S'touch sprung'\ntR." + x, "it names os.system, which is not read"),
    (lambda x: b"c__builtin__\neval\n." + x, "it names __builtin__.eval"),
    (lambda x: b"\x80\x02]r\xff\xff\xff\x7f." + x, "cannot be read"),  # C's reader takes 32 GB
    (lambda x: b"\x80\x02}." + x, "cannot be read"),
    (lambda x: x.replace(b"U\x02u1", b"U\x02u2"), "an array of b'u2'"),
    (lambda x: x.replace(b"M\x06\x00M\x00\x0c", b"M\x05\x00M\x00\x0c"), "cannot reshape"),
  ],
)
def test_other_pickles_are_refused_and_not_executed(made, tmp_path, spoil, message, monkeypatch):
  name, files, _ = made
  monkeypatch.chdir(tmp_path)
  line = error(config(name, archive(tmp_path / "a.tar.gz", spoiled(files, spoil))))
  assert message in line and not list(tmp_path.glob("*sprung*"))


@pytest.mark.parametrize("fields", [dict(stream="always"), dict(stored_size=8)])
def test_options_of_encoded_images_are_refused(made, tmp_path, fields):
  name, files, _ = made
  path = archive(tmp_path / "a.tar.gz", files)
  assert "CIFAR's archive" in error(config(name, path, **fields))
