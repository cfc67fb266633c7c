import subprocess
import sys

import numpy as np
import pytest

from mixer_jax.errors import UserError
from mixer_jax.pde import burgers, darcy, fields, function_files, generate


@pytest.fixture(autouse=True)
def chunks_of_two(monkeypatch):
  monkeypatch.setattr(generate, "_CHUNK", 2)


def test_pairs_solve_burgers_equation(tmp_path):
  fields = dict(viscosity=0.3, time=0.2, length=1.0, mean=1.0)
  made = generate.load("burgers", "train", 3, 0, 32, tmp_path, **fields)
  assert made.periodic and made.grid == (32,) and made.outputs.dtype == np.float32
  solved = burgers.solve(made.inputs, 0.3, 0.2)
  np.testing.assert_allclose(made.outputs, solved, atol=1e-6)
  assert abs(made.inputs.mean(1)).min() > 1e-3  # random means
  published = generate.load("burgers", "train", 3, 0, 32, tmp_path)
  np.testing.assert_allclose(published.inputs.mean(1), 0, atol=1e-6)


def test_pairs_solve_darcys_equation(tmp_path):
  made = generate.load("darcy", "test", 3, 0, 9, tmp_path, high=6.0)
  assert not made.periodic and made.grid == (9, 9)
  assert set(made.inputs.ravel()) == {3, 6}
  np.testing.assert_allclose(made.outputs, darcy.solve(made.inputs), rtol=1e-6)


@pytest.mark.parametrize("kind", generate.KINDS)
def test_a_larger_set_begins_with_the_smaller_one(kind, tmp_path):
  small = generate.load(kind, "train", 3, 0, 16, tmp_path)
  large = generate.load(kind, "train", 6, 0, 16, tmp_path)
  np.testing.assert_array_equal(large.inputs[:3], small.inputs)
  np.testing.assert_array_equal(large.outputs[:3], small.outputs)
  assert len(np.unique(large.outputs.reshape(6, -1), axis=0)) == 6


def test_seeds_and_splits_differ(tmp_path):
  first = generate.load("burgers", "train", 1, 0, 16, tmp_path).inputs
  for split, seed in (("test", 0), ("train", 1)):
    assert (generate.load("burgers", split, 1, seed, 16, tmp_path).inputs != first).all()


def test_a_set_is_made_once_and_its_chunks_are_removed(tmp_path, monkeypatch):
  made = generate.load("burgers", "train", 3, 0, 16, tmp_path)
  assert len(list((tmp_path / "pde").iterdir())) == 1
  monkeypatch.setattr(burgers, "solve", None)
  again = generate.load("burgers", "train", 3, 0, 16, tmp_path)
  assert isinstance(again.inputs, np.memmap)
  np.testing.assert_array_equal(again.outputs, made.outputs)


def test_a_set_leaves_the_chunk_that_another_process_writes(tmp_path, monkeypatch):
  solve, left = burgers.solve, []

  def beside(*arguments):  # of a process that makes the same set and is not so far
    if not left:
      (chunks,) = (tmp_path / "pde").glob(".chunks-*")
      left.append(chunks / ".building-other")
      left[0].mkdir()
    return solve(*arguments)

  monkeypatch.setattr(burgers, "solve", beside)
  generate.load("burgers", "train", 3, 0, 16, tmp_path)
  assert list(left[0].parent.iterdir()) == left


def test_a_stopped_generation_goes_on_from_its_chunks(tmp_path, monkeypatch):
  solve, solved = burgers.solve, []

  def stops(initial, *physics):
    solved.append(len(initial))
    if len(solved) == 3:
      raise KeyboardInterrupt
    return solve(initial, *physics)

  monkeypatch.setattr(burgers, "solve", stops)
  with pytest.raises(KeyboardInterrupt):
    generate.load("burgers", "train", 7, 0, 16, tmp_path)
  stopped = generate.load("burgers", "train", 7, 0, 16, tmp_path)
  assert solved == [2, 2, 2, 2, 1]  # the third chunk again, then the last
  monkeypatch.setattr(burgers, "solve", solve)
  whole = generate.load("burgers", "train", 7, 0, 16, tmp_path / "other")
  np.testing.assert_array_equal(stopped.outputs, whole.outputs)


def test_a_damaged_set_is_made_again(tmp_path):
  made = np.array(generate.load("burgers", "train", 2, 0, 16, tmp_path).outputs)
  (file,) = tmp_path.rglob("outputs.npy")
  file.write_bytes(file.read_bytes()[:-8] + bytes(8))
  again = generate.load("burgers", "train", 2, 0, 16, tmp_path).outputs
  np.testing.assert_array_equal(again, made)


@pytest.mark.parametrize(
  "arguments, physics, message",
  [
    (("burgers", "train", 0, 0, 16), {}, "functions is 0; allowed: 1 to 1000000"),
    (("burgers", "train", 1, -1, 16), {}, "seed is -1; allowed: 0"),
    (("darcy", "train", 1, 0, 4), {}, "points is 4; allowed: 5 to 1025"),
    (("burgers", "train", 1, 0, 16), {"viscosity": 0.0}, "viscosity is 0.0; allowed: 0.001 to 100"),
    (("darcy", "train", 1, 0, 16), {"viscosity": 0.1}, "no parameter of darcy; allowed: low, high"),
  ],
)
def test_values_that_are_not_allowed(arguments, physics, message, tmp_path):
  with pytest.raises(UserError, match=message):
    generate.load(*arguments, tmp_path, **physics)


def test_the_command(tmp_path):
  out = f"{tmp_path}/x.npz"
  command = [sys.executable, "-m", "mixer_jax.pde", "darcy", f"--out={out}", "--functions=2"]
  command += [f"--cache_dir={tmp_path}/cache", "--points=9", "--seed=5"]
  done = subprocess.run(command, capture_output=True, text=True, check=True)
  assert done.stdout.startswith(f"{out}: 2 functions on 9 x 9 points")
  expected = generate.load("darcy", "train", 2, 5, 9, tmp_path)
  np.testing.assert_array_equal(function_files.read(out).outputs, expected.outputs)


@pytest.mark.parametrize("physics", [dict(viscosity=100.0), dict(length=0.01)])
def test_a_solution_of_rounding_errors_is_none(physics, tmp_path):
  with pytest.raises(UserError, match="viscosity leaves nothing of a function"):
    generate.load("burgers", "train", 2, 0, 64, str(tmp_path), **physics)


def test_burgers_pairs_solve_the_equation_on_a_domain_of_their_length():
  """u_t + u u_y = viscosity u_yy by central differences in time and exact ones in space."""
  length, viscosity, step, points = 5.0, 0.2, 1e-4, 128
  fields = dict(viscosity=viscosity, length=length, mean=0.5)

  def at(time):
    generators = [np.random.default_rng(i) for i in range(3)]
    return generate.burgers_pairs(generators, points, time=time, **fields)[1]

  u, change = at(0.5), (at(0.5 + step) - at(0.5 - step)) / (2 * step)
  waves = 2j * np.pi * np.fft.rfftfreq(points, length / points)
  slope, bend = (np.fft.irfft(waves**n * np.fft.rfft(u), points) for n in (1, 2))
  np.testing.assert_allclose(change, viscosity * bend - u * slope, atol=1e-5)


def test_the_coefficient_is_high_where_the_field_is_positive():
  made = lambda: [np.random.default_rng(i) for i in range(2)]
  coefficient, _ = generate.darcy_pairs(made(), 9, low=3.0, high=12.0)
  np.testing.assert_array_equal(coefficient == 12, fields.neumann(made(), 9) >= 0)
