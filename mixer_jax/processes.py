"""Several processes as one program: joining, who writes, stopping together."""

import contextlib
import os
import sys
from typing import Any, Callable, Iterator, TypeVar

import jax
from jax.experimental import multihost_utils
import numpy as np

from mixer_jax import sharding
from mixer_jax.errors import UserError

T = TypeVar("T")

# A process that is silent for so long is taken for dead, and the others end.
_HEARTBEAT_SECONDS = 30
_SHUTDOWN_SECONDS = 60


def join(
  address: str | None = None,
  number: int | None = None,
  index: int | None = None,
  detect: bool = False,
) -> None:
  """Makes this process one of several; nothing without arguments.

  It must be called before JAX touches a device. Only the first process prints
  and writes from then on.

  Args:
    address: HOST:PORT of the first process, the same for all.
    number: of processes.
    index: of this one, from 0.
    detect: ask SLURM, Open MPI, Kubernetes or Cloud TPU for all three.

  Raises:
    UserError: the three are not all given or not possible, or the processes do
      not find each other.
  """
  given = (address, number, index)
  if not detect and given == (None, None, None):
    return
  if not detect and None in given:
    raise UserError(
      "--coordinator_address, --num_processes and --process_id belong together; or --distributed"
      " alone, where SLURM, Open MPI, Kubernetes or Cloud TPU knows them"
    )
  if number is not None and index is not None and not 0 <= index < number:
    raise UserError(f"--process_id is {index}; allowed: 0 to {number - 1}")
  # Its handler of SIGTERM would take the place of that of `signals`.
  jax.config.update("jax_enable_preemption_service", False)
  try:
    jax.distributed.initialize(
      address,
      number,
      index,
      heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
      shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
    )
  except (RuntimeError, ValueError) as e:
    raise UserError(f"the processes do not find each other: {_first_line(e)}") from e
  if not is_first():
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (for the life of the process)
    os.environ["TQDM_DISABLE"] = "1"


def is_first() -> bool:
  """Whether this process prints and writes."""
  return jax.process_index() == 0


def lead(action: Callable[[], T]) -> T | None:
  """What `action` returns in the first process; None in the others, which wait for it.

  Raises:
    UserError: `action` raised one; in all processes.
  """
  if jax.process_count() == 1:
    return action()
  result, error = None, None
  if is_first():
    try:
      result = action()
    except UserError as e:
      error = e
  failed = multihost_utils.broadcast_one_to_all(np.array(error is not None))
  if error is not None:
    raise error
  if failed:
    raise UserError(f"process {jax.process_index()} ends with the first, which says why")
  return result


@contextlib.contextmanager
def together() -> Iterator[None]:
  """Turns the error of losing another process into a `UserError`."""
  try:
    yield
  except jax.errors.JaxRuntimeError as e:
    if jax.process_count() == 1:
      raise
    raise UserError(
      f"process {jax.process_index()} of {jax.process_count()} lost the others or failed"
      f" ({_first_line(e)}); start all again to resume from the last checkpoint"
    ) from e


class Agreement:
  """Whether any process was asked to stop, known to all of them at the same step.

  All processes call it equally often, in the same order with their other work on
  the devices.

  Args:
    asked: whether this process was.
    mesh: the devices of all processes.
  """

  def __init__(self, asked: Callable[[], bool], mesh: jax.sharding.Mesh):
    self._asked = asked
    self._split, everywhere = sharding.batched(mesh), sharding.replicated(mesh)
    self._any = jax.jit(lambda flags: flags.any(), out_shardings=everywhere)
    self._pending: Any = None

  def soon(self) -> bool:
    """The answer at the call before this one: no process waits for another."""
    if jax.process_count() == 1:
      return self._asked()
    known, self._pending = self._pending, self._ask(self._asked())
    return known is not None and bool(known)

  def now(self, also: bool = False) -> bool:
    """The answer, or whether `also` is true in any process; all wait for each other."""
    own = self._asked() or also
    return own if jax.process_count() == 1 else bool(self._ask(own))

  def _ask(self, own: bool) -> jax.Array:
    flags = np.full(jax.local_device_count(), own)
    return self._any(jax.make_array_from_process_local_data(self._split, flags))


def _first_line(error: Exception) -> str:
  lines = str(error).strip().splitlines()
  return lines[0] if lines else type(error).__name__
