import numpy as np
import pytest

from mixer_jax.errors import UserError
from mixer_jax.pde.functions import Functions, subsampled


def functions(shape, periodic):
  values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
  return Functions(values, -values, periodic)


def test_points_of_a_periodic_grid():
  full = functions((2, 12), True)
  coarse = subsampled(full, 3)
  np.testing.assert_array_equal(coarse.inputs, full.inputs[:, [0, 3, 6, 9]])
  np.testing.assert_array_equal(coarse.outputs, -coarse.inputs)


def test_points_of_a_grid_with_a_boundary():
  full = functions((2, 7, 7), False)
  coarse = subsampled(full, 3)
  assert coarse.grid == (3, 3) and len(coarse) == 2
  np.testing.assert_array_equal(coarse.outputs[1], full.outputs[1][np.ix_([0, 3, 6], [0, 3, 6])])


@pytest.mark.parametrize(
  "shape, periodic, step, allowed",
  [
    ((1, 12), True, 5, "step=5 leaves no grid of 12 points; allowed: 1, 2, 3, 4, 6$"),
    ((1, 12), True, 12, "step=12 leaves no grid of 12 points"),
    ((1, 9, 9), False, 3, "step=3 leaves no grid of 9 points; allowed: 1, 2, 4$"),
    ((1, 9, 9), False, 0, "step=0 leaves no grid of 9"),
  ],
)
def test_steps_that_leave_no_grid(shape, periodic, step, allowed):
  with pytest.raises(UserError, match=allowed):
    subsampled(functions(shape, periodic), step)
