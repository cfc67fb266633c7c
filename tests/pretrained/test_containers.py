"""Files that are damaged or something else are refused; nothing in a file is run."""

import io
import pickle
import warnings
import zipfile

import numpy as np
import pytest

from mixer_jax import pretrained
from mixer_jax.errors import UserError
from tests.pretrained import pytorch_files
from tests.pretrained.conftest import FAMILIES, safetensors, shapes

NAME = "MixerBlock_0/token_mixing/Dense_0/kernel"
ONES = np.ones((4, 2), np.float32)


def npz(savez=np.savez, **arrays):
  buffer = io.BytesIO()
  savez(buffer, **arrays)
  return buffer.getvalue()


def archive(*members, claimed=None):
  """A .zip; each member says that it unpacks to `claimed` bytes."""
  buffer = io.BytesIO()
  with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
    warnings.simplefilter("ignore")  # of names that come twice
    for name, content in members:
      file.writestr(name, content)
      file.getinfo(name).file_size = claimed or len(content)
  return buffer.getvalue()


def npy(array):
  buffer = io.BytesIO()
  np.save(buffer, array)
  return buffer.getvalue()


def claims(shape):
  """An array of four numbers whose header says otherwise."""
  claim = f"{shape}, }}".encode().ljust(37)
  return npy(np.ones(4, np.float32)).replace(b"(4,), }" + b" " * 30, claim)


GOOD_NPZ = npz(**{NAME: np.random.default_rng(0).normal(size=(64, 64))})
GOOD = safetensors({NAME: ("F32", ONES)})
REFUSED = {
  "empty": b"",
  "text": b"these are no weights",
  "html": b"<!DOCTYPE html><html>403</html>",
  "npy": npy(ONES),
  "hdf5": b"\x89HDF\r\n\x1a\n" + b"\0" * 50,
  "truncated": GOOD_NPZ[: len(GOOD_NPZ) // 2],
  "flipped": GOOD_NPZ[:9000] + b"\xff\xff\xff" + GOOD_NPZ[9003:],
  "no_arrays": npz(),
  "pickled": npz(**{NAME: np.array([{"a": 1}], object)}),
  "integers": npz(**{NAME: np.ones(3, np.int32)}),
  "nan": npz(**{NAME: np.array([1, np.nan])}),
  "infinite": npz(**{NAME: np.array([1e300])}),
  "claims_too_much": archive((f"{NAME}.npy", claims((10**12,)))),
  "claims_less": archive((f"{NAME}.npy", claims((2,)))),
  "bomb": archive((f"{NAME}.npy", npy(ONES)), claimed=2 * 10**9),
  "st_truncated": GOOD[:-3],
  "st_header_cut": GOOD[:40],
  "st_no_json": (10).to_bytes(8, "little") + b"{nonsense}",
  "st_empty": (2).to_bytes(8, "little") + b"{}",
  "st_shape": GOOD.replace(b"[4, 2]", b"[4, 3]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_one_line(tmp_path, name):
  path = tmp_path / "weights.npz"
  path.write_bytes(REFUSED[name])
  with pytest.raises(UserError) as caught:
    pretrained.read(str(path))
  assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_flipped_bit_in_a_pytorch_file(tmp_path):
  """PyTorch itself does not look at the archive's checksums."""
  array = np.random.default_rng(0).normal(size=(64, 64))
  content = bytearray(pytorch_files.content({NAME: pytorch_files.Tensor(array)}))
  content[content.find(array.tobytes()) + 5000] ^= 1
  (tmp_path / "w.pth").write_bytes(content)
  with pytest.raises(UserError, match="w.pth: is damaged"):
    pretrained.read(str(tmp_path / "w.pth"))


def test_the_good_ones_of_the_above_are_read(tmp_path):
  for content in (GOOD_NPZ, GOOD, archive((f"{NAME}.npy", npy(ONES)))):
    (tmp_path / "weights").write_bytes(content)
    assert list(pretrained.read(str(tmp_path / "weights")).arrays) == [NAME]


class Trap:
  def __reduce__(self):
    return exec, ("import pathlib; pathlib.Path('sprung').touch()",)


def test_nothing_in_a_file_is_run(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  trap, header = pickle.dumps(Trap(), protocol=2), io.BytesIO()
  np.lib.format.write_array_header_1_0(
    header, {"descr": "|O", "fortran_order": False, "shape": (1,)}
  )
  for content in (
    trap,
    archive(("archive/data.pkl", trap), ("archive/version", b"3\n")),
    archive((f"{NAME}.npy", header.getvalue() + trap)),
    archive((NAME, trap)),
  ):
    (tmp_path / "weights.npz").write_bytes(content)
    with pytest.raises(UserError):
      pretrained.read("weights.npz")
  assert [p.name for p in tmp_path.iterdir()] == ["weights.npz"]


def test_names_that_point_elsewhere_write_nothing(tmp_path):
  inner = tmp_path / "a" / "b"
  inner.mkdir(parents=True)
  names = ("../evil", "/tmp/evil", "..\\..\\evil", f"{NAME}/../../evil")
  members = [(f"{name}.npy", npy(np.ones((16, 8)))) for name in (NAME, *names)]
  (inner / "weights.npz").write_bytes(archive(*members))
  weights = pretrained.read(str(inner / "weights.npz"))
  assert sorted(p.name for p in tmp_path.rglob("*")) == ["a", "b", "weights.npz"]
  with pytest.raises(UserError, match=r"left over are.*\.\./evil"):
    weights.fit(shapes(FAMILIES["mixer"]()))
