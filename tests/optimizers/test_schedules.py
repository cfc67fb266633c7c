"""Schedules against closed forms in NumPy."""

import jax
import numpy as np
import pytest

from mixer_jax.errors import UserError
from mixer_jax.optimizers.schedules import Multiplier

STEPS, EPOCH = 100, 10


def constant(t, start):
  return np.ones(len(t))


def step(t, start):
  return 0.1 ** ((t >= 40).astype(float) + (t >= 80))


def linear(t, start):
  return 1 - 0.8 * np.clip((t - start) / (STEPS - start), 0, 1)


def cosine(t, start):
  return 0.2 + 0.4 * (1 + np.cos(np.pi * np.clip((t - start) / (STEPS - start), 0, 1)))


def rsqrt(t, start):
  """Vaswani et al. (2017), Equation 3, without d_model, times the root of the warm-up."""
  return np.maximum(start, 1) ** 0.5 / np.maximum(t + 1, np.maximum(start, 1)) ** 0.5


@pytest.mark.parametrize("form", [constant, step, linear, cosine, rsqrt])
@pytest.mark.parametrize(
  "warmup, length",
  [
    ({}, 0),
    (dict(warmup_epochs=2.0), 20),
    (dict(warmup_epochs=0.25), 2.5),
    (dict(warmup_steps=7, warmup_epochs=3.0), 7),  # steps win
  ],
  ids=str,
)
@pytest.mark.first(8)
def test_values_equal_numpy(form, warmup, length):
  t = np.arange(STEPS + 20)
  schedule = Multiplier(form.__name__, end=0.2, epochs=(4, 8), **warmup).build(STEPS, EPOCH)
  expected = form(t, length) * (np.minimum((t + 1) / length, 1) if length else 1)
  found = jax.vmap(schedule)(t)
  assert found.dtype == np.float32
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_two_falls_at_one_step_are_both_taken():
  schedule = Multiplier("step", epochs=(2.0, 2.1), factor=0.5).build(5, 1)
  assert [float(schedule(t)) for t in (1, 2, 3)] == [1.0, 0.25, 0.25]


def test_a_schedule_built_while_tracing_is_good_afterwards():
  built = []

  @jax.jit
  def traced(count):
    built.append(Multiplier("step", epochs=(4, 8)).build(STEPS, EPOCH))
    return built[0](count)

  assert float(traced(40)) == float(built[0](40)) == np.float32(0.1)


@pytest.mark.parametrize(
  "fields, message",
  [
    (dict(warmup_epochs=10.0), "schedule.warmup_epochs is 10.0; it must be below .* length, 10"),
    (dict(warmup_steps=100), "schedule.warmup_steps is 100; it must be below .* length, 100"),
    (dict(epochs=(4, 4)), r"schedule.epochs is \(4, 4\); it must rise"),
  ],
)
def test_times_that_contradict_each_other_are_refused(fields, message):
  with pytest.raises(UserError, match=message):
    Multiplier(**fields).check_warmup(STEPS, EPOCH)
  Multiplier(warmup_epochs=9.9).check_warmup(STEPS, EPOCH)
  Multiplier(warmup_steps=99, warmup_epochs=50.0).check_warmup(STEPS, EPOCH)


def test_onecycle_is_pytorchs():
  """The values of PyTorch 2.15, OneCycleLR(max_lr=1, 10 epochs of 10 steps, pct_start=0.25)."""
  expected = {0: 1e-4, 5: 0.10341300, 20: 0.93301940, 24: 1.0, 25: 0.99956142, 50: 0.73164802}
  expected |= {75: 0.23208661, 98: 4.3859495e-4, 99: 1e-8}
  schedule = Multiplier("onecycle", rise=0.25, start=1e-4, end=1e-8).build(STEPS, EPOCH)
  found = [schedule(t) for t in expected]
  np.testing.assert_allclose(found, list(expected.values()), rtol=1e-4, atol=2e-8)


def test_onecycle_begins_at_its_start_however_short_its_rise():
  schedule = Multiplier("onecycle", rise=0.01, start=1e-4, end=1e-8).build(50, EPOCH)
  np.testing.assert_allclose([schedule(0), schedule(49)], [1e-4, 1e-8], rtol=1e-5, atol=2e-8)


def test_onecycle_has_no_other_warm_up():
  with pytest.raises(UserError, match="onecycle, which has its own"):
    Multiplier("onecycle", warmup_epochs=1.0)
