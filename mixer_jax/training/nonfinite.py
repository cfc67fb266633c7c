"""Steps whose numbers are not finite: noticed inside the step, told in one line."""

import collections
from typing import Any, Sequence

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np

from mixer_jax import optim, tasks
from mixer_jax.errors import Diverged
from mixer_jax.experiment import Experiment

# Checks of a step, in this order.
CHECKS = ("loss", "update")
# With "skip": more failures in a row are no accident.
MOST_IN_A_ROW = 50
# With "restore": orders of the examples tried from one checkpoint.
MOST_TRIES = 3


class Nonfinite(Exception):
  """A step, or an evaluation, gave numbers that are not finite.

  Attributes:
    what: "loss", "update" (new variables or optimizer state) or the loss of a test set.
    step: the first such step, from 1; of an evaluation, the last step before it.
    why: more about it, beginning with a comma.
  """

  def __init__(self, what: str, step: int, why: str = ""):
    super().__init__(f"the {what} of step {step} is not finite")
    self.what, self.step, self.why = what, step, why


class Watch:
  """Reads the checks of steps, a call or so behind the device.

  `failed` steps in a row came before. Even with "skip" an epoch of failures alone is an error.
  """

  def __init__(self, run: Experiment, failed: int = 0):
    skips = run.config.on_nonfinite == "skip"
    self._allowed = min(MOST_IN_A_ROW, run.clock.steps_per_epoch - 1) if skips else 0
    self._failed = failed
    self._unread = collections.deque()

  def add(self, step: int, checks: jax.Array) -> None:
    """Takes the `checks` of a call's steps, [steps, 2]; the first follows on `step`."""
    self._unread.append((step, checks))

  def read(self, ahead: int = 0) -> None:
    """Waits for all calls but the last `ahead`; raises `Nonfinite` if more failed than may be."""
    while len(self._unread) > ahead:
      step, checks = self._unread.popleft()
      for passed in np.asarray(checks):
        step += 1
        self._failed = 0 if passed.all() else self._failed + 1
        if self._failed > self._allowed:
          why = f", nor were the {self._allowed} before it" if self._allowed else ""
          raise Nonfinite(CHECKS[np.argmin(passed)], step, why)


def checks(metrics: Any, variables: Any, opt_state: Any) -> jax.Array:
  """Whether the numbers of a step are finite (traceable): bool [2], see `CHECKS`.

  Curvature factors may be lost long before a parameter is, so all of the state is looked at.
  """
  return jnp.stack([_finite(metrics), _finite((variables, opt_state))])


def _finite(tree: Any) -> jax.Array:
  leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
  return jnp.stack([jnp.all(jnp.isfinite(x)) for x in leaves]).all()


def where(condition: jax.Array, new: Any, old: Any) -> Any:
  """Leaf by leaf `new` if a scalar condition holds, else `old` (traceable)."""
  return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


def error(
  bad: Nonfinite, config: ConfigDict, rows: Sequence[dict[str, Any]], checkpoint: int | None
) -> Diverged:
  """One line: the step, the last good numbers and checkpoint (its step), values to try."""
  flat = jax.tree_util.tree_leaves_with_path(optim.numbers(config.optimizer))
  numbers = ", ".join(f"{'.'.join(k.key for k in path)}={value:g}" for path, value in flat)
  wanted = ("loss", tasks.find(config.task).metrics[0].name)
  losses = {k: v for k, v in rows[-1].items() if k.rpartition("/")[2] in wanted} if rows else {}
  last = "nothing was evaluated before"
  if said := ", ".join(f"{name} {value:.4f}" for name, value in losses.items()):
    last = f"the evaluation at step {rows[-1]['step']} had {said}"
  kept = f"that of step {checkpoint}" if checkpoint else "none"
  damping = "a higher damping, " if optim.kfac_side(config.optimizer) else ""
  others = [f"on_nonfinite={p}" for p in ("skip", "restore") if p != config.on_nonfinite]
  return Diverged(
    f"{bad}{bad.why} ({numbers}); {last}; last good checkpoint: {kept}. Try a lower learning_rate,"
    f" {damping}schedule.warmup_epochs, optimizer.clip_norm (a norm of the gradients), or"
    f" {', '.join(others)}"
  )
