"""Finds steps whose numbers are not finite, inside the step, and says so in one line."""

from typing import Any, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mixer_jax import tasks
from mixer_jax.errors import Diverged
from mixer_jax.experiment import Experiment
from mixer_jax.optimizers import numbers
from mixer_jax.training.state import TrainState

CHECKS = ("loss", "update")  # of a step, in this order
MOST_IN_A_ROW = 50  # with "skip": more failures in a row are no accident
MOST_TRIES = 3  # with "restore": orders of the examples tried from one checkpoint


class Nonfinite(Exception):
  """A step, or an evaluation, gave numbers that are not finite.

  `what` is the "loss", the "update" (new variables or optimizer state) or a metric of a test set;
  `step` the first such, from 1; of an evaluation, the last before it. `tried` tells of the steps
  or tries before it.
  """

  def __init__(self, what: str, step: int, tried: str = ""):
    super().__init__(f"the {what} of step {step} is not finite")
    self.step, self.tried = step, tried


class Watch:
  """Reads the checks of steps, about one call behind the device.

  `failed` steps in a row failed before. With "skip", too, an epoch in which every step fails is an error.
  """

  def __init__(self, run: Experiment, failed: int = 0):
    skips = run.config.on_nonfinite == "skip"
    self._allowed = min(MOST_IN_A_ROW, run.clock.steps_per_epoch - 1) if skips else 0
    self._failed, self._unread = failed, None

  def add(self, step: int, checks: jax.Array) -> None:
    """Takes the checks, bool [steps, 2], of a call whose first step comes after `step`."""
    self.read()  # those of the call before: the progress bar is true, and the queue short
    self._unread = step, checks

  def read(self) -> None:
    """Waits for the last call; raises `Nonfinite` if too many steps have failed."""
    (step, checks), self._unread = self._unread or (0, ()), None
    for number, passed in enumerate(np.asarray(checks), step + 1):
      self._failed = 0 if passed.all() else self._failed + 1
      if self._failed > self._allowed:
        tried = f"nor were the {self._allowed} before it" if self._allowed else ""
        raise Nonfinite(CHECKS[np.argmin(passed)], number, tried)


def checks(metrics: Any, variables: Any, opt_state: Any) -> jax.Array:
  """Whether the numbers of a step are finite (traceable): bool [2], see `CHECKS`.

  Curvature factors may overflow long before a parameter does, so the whole state is looked at. -inf, the
  largest of no values, is no failure.
  """
  is_largest = lambda x: isinstance(x, tasks.Largest)
  some = lambda x: jnp.maximum(x.largest, 0) if is_largest(x) else x
  metrics = jax.tree.map(some, metrics, is_leaf=is_largest)
  floats = lambda tree: [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
  finite = lambda tree: jnp.array([jnp.isfinite(x).all() for x in floats(tree)], bool).all()
  return jnp.stack([finite(metrics), finite((variables, opt_state))])


def diverged(
  bad: Nonfinite, run: Experiment, state: TrainState, rows: Sequence[dict], checkpoint: int | None
) -> Diverged:
  """The error that ends a run, in one line: the step, its numbers, the last good row, advice.

  `state` is that after the call of the step; `checkpoint` is the step of the last good one, 0 if
  there is none yet, or None where none are made.
  """
  applied = _numbers(bad.step, run, state)
  numbers = ", ".join(f"{name}={value:.4g}" for name, value in sorted(applied.items()))
  happened = ", ".join(filter(None, (str(bad), bad.tried)))
  wanted = ("loss", run.task.metrics[0].name)
  last = rows[-1] if rows else {}
  losses = [f"{k} {v:.4f}" for k, v in last.items() if k.rpartition("/")[2] in wanted]
  said = f"the evaluation at step {last['step']} had {', '.join(losses)}" if losses else ""
  kept = f"; last good checkpoint: {f'that of step {checkpoint}' if checkpoint else 'none'}"
  policies = ("skip",) if checkpoint is None else ("skip", "restore")
  damping = "a higher damping, " if any(name.endswith("damping") for name in applied) else ""
  others = [f"on_nonfinite={p}" for p in policies if p != run.config.on_nonfinite]
  or_others = f", or {', '.join(others)}" if others else ""
  return Diverged(
    f"{happened} ({numbers}); {said or 'nothing was evaluated before'}"
    f"{'' if checkpoint is None else kept}. Try a lower learning_rate, {damping}"
    f"schedule.warmup_epochs, optimizer.clip_norm (a norm of the gradients){or_others}"
  )


def _numbers(step: int, run: Experiment, state: TrainState) -> dict[str, float]:
  """The rates and dampings of a step, and those that the quadratic model chose."""
  at = run.multiplier(min(step - 1, int(state.step - state.skipped)))
  return numbers.given(state.opt_state, lambda count: at) | numbers.chosen(state.opt_state)
