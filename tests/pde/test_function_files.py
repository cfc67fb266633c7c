"""Files in the layout of Li et al., written by NumPy and SciPy."""

import pathlib
import shutil

import numpy as np
import pytest
from scipy import io

from mixer_jax.errors import UserError
from mixer_jax.pde import function_files
from mixer_jax.pde.functions import Functions

RNG = np.random.default_rng(0)
LINES, SQUARES = RNG.normal(size=(2, 3, 8)), RNG.normal(size=(2, 3, 5, 5))


@pytest.fixture(params=[".npz", ".mat"])
def save(request, tmp_path):
  def saved(**arrays):
    path = tmp_path / f"file{request.param}"
    np.savez(path, **arrays) if request.param == ".npz" else io.savemat(path, arrays)
    return str(path)

  return saved


def test_burgers_and_darcy_are_told_apart_by_their_names(save):
  read = function_files.read(save(a=LINES[0], u=LINES[1], a_smooth=LINES[0]))
  assert read.periodic and read.inputs.dtype == np.float64
  np.testing.assert_array_equal([read.inputs, read.outputs], LINES)
  phases = SQUARES[0] > 0
  read = function_files.read(save(coeff=phases, sol=SQUARES[1].astype(np.float32)))
  assert not read.periodic and read.inputs.dtype == read.outputs.dtype == np.float32
  np.testing.assert_array_equal(read.inputs, phases)


def test_other_names(save):
  path = save(x=LINES[0], y=LINES[1])
  np.testing.assert_array_equal(function_files.read(path, "x", "y").outputs, LINES[1])
  with pytest.raises(UserError, match="no arrays 'a' and 'u' or 'coeff' and 'sol', only 'x', 'y'"):
    function_files.read(path)
  with pytest.raises(UserError, match="both names or none"):
    function_files.read(path, "x")
  with pytest.raises(UserError, match="no arrays 'x' and 'z', only 'x', 'y'"):
    function_files.read(path, "x", "z")


def test_one_side(save, tmp_path):
  path = save(a=LINES[0], u=LINES[1])
  capitals = shutil.copy(path, tmp_path / f"COPY{pathlib.Path(path).suffix.upper()}")
  np.testing.assert_array_equal(function_files.read_side(str(capitals)), np.float32(LINES[0]))
  np.testing.assert_array_equal(function_files.read_side(path), np.float32(LINES[0]))
  np.testing.assert_array_equal(function_files.read_side(path, outputs=True), np.float32(LINES[1]))
  np.testing.assert_array_equal(function_files.read_side(path, "u"), np.float32(LINES[1]))
  with pytest.raises(
    UserError, match="no array 'sol', only 'a', 'u'; other names go by data.outputs"
  ):
    function_files.read_side(path, "sol", outputs=True)


def test_shapes(save):
  with pytest.raises(UserError, match=r"'a' \[3, 8\] and 'u' \[2, 8\]; inputs and outputs are"):
    function_files.read(save(a=LINES[0], u=LINES[1, :2]))
  for read in (function_files.read, function_files.read_side):
    with pytest.raises(UserError, match=r"'coeff' \[3, 5, 1\].*, without a last axis of 1$"):
      read(save(coeff=SQUARES[0, :, :, :1], sol=SQUARES[1, :, :, :1]))
  rectangles = function_files.read(save(coeff=SQUARES[0, :, :, :4], sol=SQUARES[1, :, :, :4]))
  assert rectangles.grid == (5, 4)


def test_numbers(save):
  bad = LINES[1].copy()
  bad[1, :2], bad[2, 0] = (np.nan, 1e300), np.inf  # 1e300 is none in float32
  told = (
    "'u' is not finite in float32 at 3 numbers of 2 functions, the first, nan, in function 1 at"
  )
  with pytest.raises(UserError, match=f"{told} point 0; allowed: finite numbers$"):
    function_files.read(save(a=LINES[0], u=bad))
  bad = SQUARES[1].copy()
  bad[2, 3, 1] = 1e300
  told = r"'sol' .* at 1 number of 1 function, the first, 1e\+300, in function 2 at point 3, 1;"
  with pytest.raises(UserError, match=told):
    function_files.read(save(coeff=SQUARES[0], sol=bad))
  for read in (function_files.read, function_files.read_side):
    with pytest.raises(UserError, match=r"'a' is \[0, 8\], without a function"):
      read(save(a=LINES[0, :0], u=LINES[1, :0]))
  with pytest.raises(UserError, match="'u' .*no (array of )?real numbers"):
    function_files.read(save(a=LINES[0], u=np.array(["x"])))


def test_truncated_files(save):
  path = save(a=LINES[0], u=LINES[1])
  with open(path, "r+b") as file:
    file.truncate(file.seek(0, 2) - 100)
  with pytest.raises(UserError, match="cannot be read"):
    function_files.read(path)


def test_missing_files(tmp_path):
  with pytest.raises(UserError, match=r"no.mat: no such file; `python -m mixer_jax.pde burgers "):
    function_files.read(f"{tmp_path}/no.mat")
  with pytest.raises(UserError, match=r"end in .npz or .mat"):
    function_files.read(f"{tmp_path}/no.h5")


def test_matlab_7_3(tmp_path):
  (tmp_path / "x.mat").write_bytes(b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM" + bytes(400))
  with pytest.raises(UserError, match="v7.3"):
    function_files.read(f"{tmp_path}/x.mat")


def test_written_files_are_read(tmp_path):
  path = f"{tmp_path}/x.npz"
  for arrays, periodic in ((LINES, True), (SQUARES, False)):
    function_files.write(path, Functions(*arrays, periodic))
    read = function_files.read(path)
    assert read.periodic == periodic
    np.testing.assert_array_equal([read.inputs, read.outputs], arrays)
  assert [p.name for p in tmp_path.iterdir()] == ["x.npz"]
  with pytest.raises(UserError, match="cannot be written: No such file or directory"):
    function_files.write(f"{tmp_path}/no/x.npz", read)
