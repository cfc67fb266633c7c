"""Both Gauss-Newton steps of the benchmark are one."""

import jax
import numpy as np

from benchmarks import gauss_newton


def test_both_updates_are_equal():
  own = gauss_newton.problem(gauss_newton.Setting(width=6, points=10, dimension=2))
  found = {name: jax.jit(f)(own.params, own.points) for name, f in own.updates.items()}
  flat = {name: jax.flatten_util.ravel_pytree(x)[0] for name, x in found.items()}
  size = np.abs(flat["Jacobian"]).max()
  np.testing.assert_allclose(flat["layers"], flat["Jacobian"], atol=1e-3 * size)
  assert own.uses > 1


def test_times_and_memory_are_measured():
  own = gauss_newton.problem(gauss_newton.Setting(width=3, points=4, dimension=1))
  for seconds, size in gauss_newton.measured(own, 1).values():
    assert seconds > 0 and size >= 0
