"""The reader of .mat files against SciPy's writer."""

import io as streams

import numpy as np
import pytest
from scipy import io

from mixer_jax.pde import mat

RNG = np.random.default_rng(0)
ARRAYS = {
  "double": RNG.normal(size=(3, 4)),
  "single": RNG.normal(size=(2, 3, 4)).astype(np.float32),
  "phases": RNG.integers(0, 2, (2, 5, 3)) > 0,
  "int16": RNG.integers(-300, 300, (7, 1), np.int16),
  "uint64": np.array([[2**64 - 1]], np.uint64),
  "b": np.array([[7]], np.uint8),  # name and number are small elements
  "an_empty_array": np.zeros((0, 3)),
}


@pytest.mark.parametrize("do_compression", [False, True])
def test_arrays(tmp_path, do_compression):
  text = {"text": "some", "complex": np.array([[1j]]), "record": {"x": 1.0}}
  io.savemat(tmp_path / "x.mat", ARRAYS | text, do_compression=do_compression)
  file = mat.Mat(tmp_path / "x.mat")
  assert file.names == (*ARRAYS, *text)
  for name, array in ARRAYS.items():
    read = file.read(name)
    np.testing.assert_array_equal(read, array, strict=name != "phases")  # read as uint8
  for name in text:
    with pytest.raises(ValueError, match="no array of real numbers"):
      file.read(name)


def test_arrays_beside_an_object_of_matlab(tmp_path):
  """A string: flags, name, system, class and content, without a shape."""
  part = lambda kind, x: np.array([kind, len(x)], "<u4").tobytes() + x + b"\0" * (-len(x) % 8)
  inner = part(6, np.array([13, 0], "<u4").tobytes()) + part(5, np.array([6, 1], "<i4").tobytes())
  inner = part(14, inner + part(1, b"") + part(6, bytes(24)))
  parts = part(6, np.array([17, 0], "<u4").tobytes()), part(1, b"note"), part(1, b"MCOS")
  io.savemat(tmp_path / "x.mat", {"a": np.eye(3)})
  with open(tmp_path / "x.mat", "ab") as file:
    file.write(part(14, b"".join((*parts, part(1, b"string"), inner))))
  assert set(io.loadmat(tmp_path / "x.mat")) >= {"a"}
  found = mat.Mat(tmp_path / "x.mat")
  np.testing.assert_array_equal(found.read("a"), np.eye(3))
  with pytest.raises(ValueError, match="no array of real numbers"):
    found.read("note")


def test_an_empty_file_is_told(tmp_path):
  (tmp_path / "x.mat").write_bytes(b"")
  with pytest.raises(ValueError, match="the file is empty"):
    mat.Mat(tmp_path / "x.mat")


def test_bytes_in_the_other_order(tmp_path):
  """A file as a big-endian machine writes it, made by hand."""
  big = lambda kind, dtype, values: (
    np.array([kind, np.array(values, dtype).nbytes], ">u4").tobytes()
    + (content := np.array(values, dtype).tobytes())
    + bytes(-len(content) % 8)
  )
  parts = big(6, ">u4", [6, 0]) + big(5, ">i4", [2, 3]) + big(1, "S1", [b"a"])
  parts += big(9, ">f8", range(6))
  header = b"MATLAB 5.0".ljust(124) + b"\x01\x00MI"
  (tmp_path / "x.mat").write_bytes(header + np.array([14, len(parts)], ">u4").tobytes() + parts)
  np.testing.assert_array_equal(mat.Mat(tmp_path / "x.mat").read("a"), [[0, 2, 4], [1, 3, 5]])


@pytest.mark.parametrize("do_compression", [False, True])
def test_every_file_that_is_cut_off_is_refused(tmp_path, do_compression):
  stream = streams.BytesIO()
  io.savemat(stream, {"a": ARRAYS["double"]}, do_compression=do_compression)
  for length in range(129, len(stream.getvalue())):
    (tmp_path / "x.mat").write_bytes(stream.getvalue()[:length])
    with pytest.raises(ValueError):
      mat.Mat(tmp_path / "x.mat").read("a")
