"""Steps whose numbers are not finite: noticed inside the step, told in one line."""

import collections
from typing import Any, Sequence

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from mixer_jax.errors import Diverged

POLICIES = ("stop", "skip", "restore")
# Checks of a step, in this order.
CHECKS = ("loss", "update")
# With "skip": more failures in a row are no accident.
MOST_IN_A_ROW = 50
# With "restore": orders of the examples tried from one checkpoint.
MOST_TRIES = 3


class Nonfinite(Exception):
  """A step, or the test after an epoch, gave numbers that are not finite.

  Attributes:
    what: "loss", "update" (new parameters or optimizer state) or "test loss".
    step: the first such step, counted from 1 over the run; of the test, the last
      step before it.
    epoch: it belongs to.
    metrics: means over the epoch's finite steps; empty if it had none.
    why: more about it, beginning with a comma.
  """

  def __init__(self, what: str, step: int, epoch: int, metrics: dict[str, float], why: str = ""):
    super().__init__(what, step, epoch)
    self.what, self.step, self.epoch, self.metrics, self.why = what, step, epoch, metrics, why


class Watch:
  """Reads the checks of an epoch's steps, a call or so behind the device.

  Args:
    policy: `config.on_nonfinite`.
    epoch: its number.
    steps: of an epoch; with "skip" they must not all fail.
    failed: how many of the epoch failed, if none passed so far.
  """

  def __init__(self, policy: str, epoch: int, steps: int, failed: int):
    self._allowed = min(MOST_IN_A_ROW, steps - 1) if policy == "skip" else 0
    self._epoch = epoch
    self._failed = failed  # the last so many steps
    self._unread = collections.deque()

  def add(self, step: int, checks: jax.Array) -> None:
    """Takes the `checks` of a call's steps, [steps, 2]; the first follows on `step`."""
    self._unread.append((step, checks))

  def read(self, totals: Any, ahead: int = 0) -> None:
    """Waits for all calls but the last `ahead`, and looks at their checks.

    Args:
      totals: the metrics so far, for the message.
      ahead: how many to leave.

    Raises:
      Nonfinite: a step failed that is not to be skipped, or too many in a row.
    """
    while len(self._unread) > ahead:
      step, checks = self._unread.popleft()
      for passed in np.asarray(checks):
        step += 1
        self._failed = 0 if passed.all() else self._failed + 1
        if self._failed > self._allowed:
          metrics = {name: float(value) for name, value in totals.compute().items()}
          metrics = metrics if np.isfinite(metrics["loss"]) else {}  # the mean of none
          what = CHECKS[np.argmin(passed)]
          why = f", nor were the {self._allowed} before it" if self._allowed else ""
          raise Nonfinite(what, step, self._epoch, metrics, why)


def checks(metrics: Any, params: Any, opt_state: Any) -> jax.Array:
  """Whether what a step gave is finite (traceable): bool [2], see `CHECKS`.

  Curvature factors may be lost long before a parameter is: all of the optimizer's
  state is looked at.
  """
  return jnp.stack([_finite(metrics), _finite((params, opt_state))])


def _finite(tree: Any) -> jax.Array:
  leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
  return jnp.stack([jnp.all(jnp.isfinite(x)) for x in leaves]).all()


def where(condition: jax.Array, new: Any, old: Any) -> Any:
  """Leaf by leaf `new` if a scalar condition holds, else `old` (traceable)."""
  return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


def error(
  bad: Nonfinite,
  config: ml_collections.ConfigDict,
  rows: Sequence[dict[str, Any]],
  checkpoint: int | None,
) -> Diverged:
  """One line: what happened where, what was last good, what to try.

  Args:
    bad: what happened.
    config: of the run.
    rows: of the epochs finished.
    checkpoint: the step of the last good checkpoint.
  """
  what = f"the {bad.what} of step {bad.step} (epoch {bad.epoch}) is not finite{bad.why}"
  if bad.metrics:
    last = f"the epoch's finite steps have loss {bad.metrics['loss']:.4f}"
    last += f", accuracy {bad.metrics['accuracy']:.2%}"
  elif rows:
    last = f"epoch {rows[-1]['epoch']} had train loss {rows[-1]['train/loss']:.4f}"
    last += f", test loss {rows[-1]['test/loss']:.4f}"
  else:
    last = "no step before it was finite"
  kept = f"that of step {checkpoint}" if checkpoint else "none"
  return Diverged(f"{what}; {last}; last good checkpoint: {kept}. Try {_advice(config)}")


def _advice(config: ml_collections.ConfigDict) -> str:
  sides = [config.optimizer]
  if config.optimizer.name == "graft":
    sides = [config.optimizer.magnitude, config.optimizer.direction]
  damping = "a higher damping, " if any(side.name == "kfac" for side in sides) else ""
  others = ", ".join(f"on_nonfinite={p}" for p in POLICIES[1:] if p != config.on_nonfinite)
  return (
    f"a lower learning_rate, {damping}schedule.warmup_epochs, optimizer.clip_norm (a norm of the"
    f" gradients), or {others}"
  )
