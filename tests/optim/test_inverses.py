"""K-FAC's factored damping and warm-started bases against NumPy in float64, over 25 steps."""

import numpy as np
import pytest

from mixer_jax import optim
from tests.optim.two_layers import (
  assert_steps,
  averages,
  matrix,
  power_iteration,
  predict,
  sequence,
  updates_of,
)


@pytest.mark.parametrize("kind", ["factored", "qr"])
def test_inverses(kind):
  """Changing gradients; the averages of the factors begin at the identity."""
  options = dict(damping=0.1, factor_decay=0.7, factor_period=3, inverse_period=6)
  given = dict(decomposition=optim.Decomposition("qr"))
  given = given if kind == "qr" else dict(damping_type="factored")
  curvature = optim.Curvature(predict, *sequence()[0][:2], estimation="empirical")
  tx = optim.scale_by_kfac(curvature, **options, **given)
  wanted, kept = [], {}
  for t, factors in averages(0.7, 3):
    wanted.append({})
    for name, (a, g) in factors.items():
      v = matrix(sequence()[t][2][name])
      if t % 6 == 0 and kind == "qr":
        if t == 0:
          bases = [np.linalg.eigh(f)[1] for f in (a, g)]
        else:
          bases = [power_iteration(f, q)[0] for f, q in zip((a, g), kept[name][0])]
        kept[name] = bases, [np.diag(q.T @ f @ q) for f, q in zip((a, g), bases)]
      elif t % 6 == 0:
        pi = np.sqrt((np.trace(a) / len(a)) / (np.trace(g) / len(g)))
        shifts = pi * np.sqrt(0.1), np.sqrt(0.1) / pi
        kept[name] = [np.linalg.inv(f + s * np.eye(len(f))) for f, s in zip((a, g), shifts)]
      one, two = kept[name]
      if kind == "qr":
        (qa, qg), values = one, np.outer(*two)
        wanted[-1][name] = qa @ (qa.T @ v @ qg / (values + 0.1)) @ qg.T
      else:
        wanted[-1][name] = one @ v @ two
  assert_steps(updates_of(tx)[0], wanted)
