"""Products of few bits on a CPU, beside NumPy's."""

import jax
import ml_dtypes
import numpy as np

from benchmarks import precision


def test_one_pass_is_the_product_of_rounded_operands_and_further_passes_add_the_rest():
  rng = np.random.default_rng(0)
  x, y = rng.normal(size=(2, 64, 64)).astype(np.float32)
  exact = x.astype(np.float64) @ y

  def found(bits, count):
    jax.clear_caches()
    with precision.multiplying(bits, count):
      return np.asarray(jax.jit(lambda x, y: x @ y)(x, y))

  few = lambda z: z.astype(ml_dtypes.bfloat16).astype(np.float64)
  np.testing.assert_allclose(found(7, 1), few(x) @ few(y), atol=1e-5)
  errors = [np.abs(found(7, count) - exact).max() for count in (1, 2, 3)]
  assert errors[0] > 50 * errors[1] > 50 * errors[2]
  jax.clear_caches()


def test_a_factor_has_the_condition_and_its_inverse_s_step_is_exact_in_float32():
  assert np.linalg.cond(precision.factor(1e2, 0)[0]) - 100 < 1e-6
  assert precision.error("inverses", "library", 1e1, 23, 1) < 1e-5
