"""Solutions of `mixer_jax.pde` beside those of a small public set, for docs/operators.md.

  python -m tests.pde.public_sets burgers_test_16.npz darcy_test_32.npz

The files are of github.com/neuraloperator/neuraloperator, neuralop/data/datasets/data, whose .pt
PyTorch turns into NumPy's: np.savez("burgers_test_16.npz", **torch.load("burgers_test_16.pt")).
"""

import sys

import numpy as np

from mixer_jax.pde import burgers, darcy

_FITTED = 8  # functions of Darcy's set that its unknown coefficients are fitted on
_FINER = 2  # intervals of our grid in one of the set


def relative(found: np.ndarray, wanted: np.ndarray) -> np.ndarray:
  """The relative L2 error of each function, [functions]."""
  flat = lambda x: x.reshape(len(x), -1)
  return np.linalg.norm(flat(found - wanted), axis=1) / np.linalg.norm(flat(wanted), axis=1)


def compare_burgers(initial: np.ndarray, states: np.ndarray) -> None:
  """Prints errors at three times of [functions, 17 times from 0 to 1, points], viscosity 0.01."""
  for part in (4, 8, 16):
    found = burgers.solve(initial, 0.01, part / 16)
    pooled = np.linalg.norm(found - states[:, part]) / np.linalg.norm(states[:, part])
    errors = relative(found, states[:, part])
    text = f"of all together {pooled:.2%}, mean of functions {errors.mean():.2%}"
    print(f"Burgers, time {part / 16:g}: {text}, worst {errors.max():.2%}")


def compare_darcy(high: np.ndarray, pressures: np.ndarray) -> None:
  """Prints errors of [functions, 32, 32] at the points i / 32; `high` is where a is the larger.

  The set tells neither coefficient: their ratio and the scale of u are fitted on some functions,
  the errors are of the others. Between two points the coefficient is that of the first.
  """
  side = _FINER * high.shape[1] + 1
  near = np.minimum(np.arange(side) // _FINER, high.shape[1] - 1)

  def solve(rows, ratio):
    fine = darcy.solve(np.where(high[rows], ratio, 1.0)[:, near][:, :, near])
    return fine[:, ::_FINER, ::_FINER][:, : high.shape[1], : high.shape[1]]

  def fitted(ratio):
    u, wanted = solve(slice(_FITTED), ratio), pressures[:_FITTED]
    scale = np.vdot(u, wanted) / np.vdot(u, u)
    return np.linalg.norm(scale * u - wanted), ratio, scale

  _, ratio, scale = min(map(fitted, range(2, 31)))
  errors = relative(scale * solve(slice(_FITTED, None), ratio), pressures[_FITTED:])
  text = f"mean of {len(errors)} functions {errors.mean():.2%}, worst {errors.max():.2%}"
  print(f"Darcy: ratio {ratio}, scale {scale:.3g} (fitted on {_FITTED}): {text}")


if __name__ == "__main__":
  first, second = (np.load(path) for path in sys.argv[1:])
  compare_burgers(np.float64(first["x"]), np.float64(first["y"]))
  compare_darcy(np.asarray(second["x"], bool), np.float64(second["y"]))
