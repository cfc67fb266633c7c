"""Schedules against values written by hand."""

import jax
import numpy as np
import pytest

from mixer_jax import config as config_lib
from mixer_jax.optim import schedules


def values(counts, num_epochs=10, **fields):
  config = config_lib.default().schedule
  config.update(fields)
  schedule = schedules.build(config, steps_per_epoch=10, num_epochs=num_epochs)
  return [float(schedule(c)) for c in counts]


@pytest.mark.parametrize(
  "fields, counts, expected",
  [
    (dict(name="constant"), [0, 99], [1, 1]),
    (dict(name="step", epochs=(4, 8)), [0, 39, 40, 79, 80, 99], [1, 1, 0.1, 0.1, 0.01, 0.01]),
    (dict(name="linear"), [0, 25, 50, 100], [1, 0.75, 0.5, 0]),
    (dict(name="linear", end=0.2), [0, 50, 100], [1, 0.6, 0.2]),
    (dict(name="cosine"), [0, 50, 100], [1, 0.5, 0]),
    (dict(name="constant", warmup_epochs=1.0), [0, 4, 9, 10, 50], [0.1, 0.5, 1, 1, 1]),
    (dict(name="linear", warmup_epochs=2.0), [1, 20, 60, 100], [0.1, 1, 0.5, 0]),
  ],
)
def test_values(fields, counts, expected):
  np.testing.assert_allclose(values(counts, **fields), expected, rtol=1e-5, atol=1e-6)


def test_a_schedule_built_while_tracing_is_good_afterwards():
  config = config_lib.default().schedule
  config.update(name="step", epochs=(4, 8))
  built = []

  @jax.jit
  def traced(count):
    built.append(schedules.build(config, steps_per_epoch=10, num_epochs=10))
    return built[0](count)

  assert float(traced(40)) == float(built[0](40)) == np.float32(0.1)
