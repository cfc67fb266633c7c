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
  with pytest.raises(UserError, match="both names or none"):
    function_files.read(path, "x")


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


def test_rectangles(save):
  assert function_files.read(save(coeff=SQUARES[0, :, :, :4], sol=SQUARES[1, :, :, :4])).grid == (
    5,
    4,
  )


@pytest.mark.parametrize(
  "inputs, outputs, given, grid",
  [
    ((3, 8), (3, 8, 2), 0, (8,)),
    ((3, 8, 2), (3, 8), 0, (8,)),
    ((3, 8, 2), (3, 8, 5), 0, (8,)),
    ((3, 8, 2), (3, 8, 2), 1, (8,)),
    ((3, 8, 2), (3, 8, 2), 0, (8, 2)),
    ((3, 8, 1), (3, 8, 1), 0, (8,)),
    ((3, 5, 4), (3, 5, 4, 2), 0, (5, 4)),
    ((3, 5, 4, 2), (3, 5, 4, 2), 0, (5, 4)),
  ],
)
def test_a_last_axis_has_channels(save, inputs, outputs, given, grid):
  a, u = np.ones(inputs), np.ones(outputs)
  read = function_files.read(save(x=a, y=u), "x", "y", given)
  assert (read.grid, read.axes, read.periodic) == (grid, len(grid), len(grid) == 1)
  assert (read.inputs.shape, read.outputs.shape) == (inputs, outputs)


def spoiled(array, place, value):
  changed = array.copy()
  changed[place] = value
  return changed


@pytest.mark.parametrize(
  "arrays, message",
  [
    (dict(a=LINES[0], u=LINES[1, :2]), r"has \[3, 8\] and \[2, 8\] .* allowed: one shape"),
    (dict(coeff=SQUARES[0, :, :1], sol=SQUARES[1, :, :1]), r"\[3, 1, 5\] with data.grid_axes=2"),
    (dict(a=LINES[0], u=SQUARES[1]), r"\[3, 8\] and \[3, 5, 5\] with data.grid_axes=1"),
    (dict(a=LINES[0, :0], u=LINES[1, :0]), r"'a' is \[0, 8\]|\[0, 0\]"),
    (dict(a=LINES[0], u=spoiled(LINES[1], (1, 3), np.nan)), "'u' .* nan, in function 1 at point 3"),
    (dict(coeff=SQUARES[0], sol=spoiled(SQUARES[1], (2, 3, 1), 1e300)), "function 2 at point 3, 1"),
    (dict(a=LINES[0], u=np.array(["x"])), "'u' cannot be read"),
    (dict(a=LINES[0], u=LINES[1] * 1j), "'u' cannot be read"),
    (dict(x=LINES[0], y=LINES[1]), "no array 'a' and 'u' or 'coeff' and 'sol', only 'x', 'y'"),
  ],
)
def test_arrays_that_are_no_functions(save, arrays, message):
  with pytest.raises(UserError, match=message):
    function_files.read(save(**arrays))


def test_files_that_cannot_be_read(save, tmp_path):
  whole = pathlib.Path(path := save(a=LINES[0], u=LINES[1])).read_bytes()
  pathlib.Path(path).write_bytes(whole[:-100])
  (tmp_path / "x.mat").write_bytes(b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM" + bytes(400))
  cases = {path: "cannot be read", f"{tmp_path}/x.mat": "v7.3"}
  cases |= {f"{tmp_path}/no.mat": "no such file; `python -m mixer_jax.pde", "x.h5": "end in .npz"}
  for name, message in cases.items():
    with pytest.raises(UserError, match=message):
      function_files.read(name)


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
