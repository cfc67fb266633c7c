"""Schedules of learning rate and weight decay as multipliers: 1 is the optimizer's own number.

A schedule multiplies every learning rate of a run, so both sides of a grafted
pair follow it.
"""

import dataclasses
from typing import Annotated, Callable

import jax
import jax.numpy as jnp
import optax

from mixer_jax.errors import UserError
from mixer_jax.options import Option

_DECAY_END = "last multiplier of the weight decay, which moves there by half a cosine; 1: constant"
# From an update count to a float32 multiplier.
Schedule = Callable[[jax.Array], jax.Array]


_FORMS = ("constant", "step", "cosine", "linear", "onecycle", "rsqrt")


@dataclasses.dataclass(frozen=True)
class Multiplier:
  """A warm-up and a form; raises a UserError for epochs that do not rise.

  "rsqrt" falls as the inverse square root of the update count, from 1 at the end of the warm-up
  (Vaswani et al., 2017, Equation 3). Cosine and linear reach `end` after the last update, onecycle
  in it. The k-th update of a warm-up of n steps has k / n of the rate, so that none is lost; optax's
  schedules and big_vision's have (k - 1) / n, which is 0 in the first.
  """

  name: Annotated[str, Option("form of the schedule", choices=_FORMS)] = "constant"
  warmup_epochs: Annotated[
    float, Option("length of a linear rise; update k of n has k / n of the rate", 0)
  ] = 0.0
  warmup_steps: Annotated[int, Option("length of the warm-up in steps; 0: warmup_epochs", 0)] = 0
  end: Annotated[float, Option("multiplier to which cosine, linear and onecycle fall", 0, 1)] = 0.0
  rise: Annotated[float, Option("onecycle: share of the run before the peak", 0, 1)] = 0.3
  start: Annotated[float, Option("onecycle: first multiplier", 0, 1)] = 1e-4
  epochs: Annotated[tuple, Option("step: epochs at which the rate falls, ascending", 0)] = ()
  factor: Annotated[float, Option("step: multiplier of the rate at each of these epochs", 0, 1)] = (
    0.1
  )
  decay_end: Annotated[float, Option(_DECAY_END, 0)] = 1.0

  def __post_init__(self):
    if list(self.epochs) != sorted(set(self.epochs)):
      raise UserError(f"schedule.epochs is {tuple(self.epochs)}; it must rise")
    if self.name == "onecycle" and (self.warmup_epochs or self.warmup_steps):
      raise UserError("schedule.name is onecycle, which has its own warm-up: set schedule.rise")

  def check_warmup(self, num_steps: float, steps_per_epoch: float) -> None:
    """Raises a UserError for a warm-up that is no shorter than the run."""
    field = "warmup_steps" if self.warmup_steps else "warmup_epochs"
    length = num_steps if self.warmup_steps else num_steps / steps_per_epoch
    if not (value := getattr(self, field)) < length:
      unit = field.removeprefix("warmup_")
      why = f"it must be below the run's length, {length:g} {unit}; 0: none"
      raise UserError(f"schedule.{field} is {value}; {why}")

  def build(self, num_steps: int, steps_per_epoch: int) -> Schedule:
    """The multiplier as a function of the update count, for a run of num_steps updates."""
    warmup = self.warmup_steps or self.warmup_epochs * steps_per_epoch
    length = max(num_steps - warmup, 1)
    if self.name == "step":
      steps = [round(epoch * steps_per_epoch) for epoch in self.epochs]
      falls = {step: self.factor ** steps.count(step) for step in steps}
      base = optax.piecewise_constant_schedule(1.0, falls)
    elif self.name == "cosine":
      base = optax.cosine_decay_schedule(1.0, length, self.end)
    elif self.name == "linear":
      base = optax.linear_schedule(1.0, self.end, length)
    elif self.name == "onecycle":
      base = self._onecycle(num_steps)
    elif self.name == "rsqrt":
      base = lambda count: jnp.sqrt(max(warmup, 1) / jnp.maximum(count + 1, max(warmup, 1)))
    else:
      base = optax.constant_schedule(1.0)
    # Cosine and linear begin to fall when the warm-up ends; steps fall at their epochs.
    start = warmup if self.name in ("cosine", "linear") else 0

    def multiplier(count):
      count = jnp.asarray(count, jnp.float32)
      value = base(jnp.maximum(count - start, 0.0))
      return value * jnp.minimum((count + 1) / warmup, 1.0) if warmup else value

    return multiplier

  def decay(self, num_steps: int) -> Schedule | None:
    """The multiplier of the weight decay (Caron et al., 2021, Section 3.2); None: constant."""
    constant = self.decay_end == 1.0
    return None if constant else optax.cosine_decay_schedule(1.0, num_steps, self.decay_end)

  def _onecycle(self, num_steps: int) -> Schedule:
    """Half a cosine up from `start`, another one down to `end`, as PyTorch's OneCycleLR.

    Smith and Topin, "Super-Convergence", 2018, https://arxiv.org/abs/1708.07120. Momentum stays as
    it is, where OneCycleLR has it fall and rise. The first and the last update have the end values.
    """
    peak, last = max(self.rise * num_steps - 1, 0.0), num_steps - 1

    def between(count, first, final, low, high):
      share = jnp.clip((count - first) / max(final - first, 1e-9), 0, 1)
      return low + (high - low) * (1 - jnp.cos(jnp.pi * share)) / 2

    def base(count):
      rising = between(count, 0.0, peak, self.start, 1.0)
      return jnp.where(count <= peak, rising, between(count, peak, last, 1.0, self.end))

    return base
