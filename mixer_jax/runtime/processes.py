"""Several processes as one program: joining, who writes, stopping together."""

import contextlib
import os
import sys
from typing import Any, Callable, Iterator, TypeVar

import jax
from jax.experimental import multihost_utils
import numpy as np

from mixer_jax.errors import UserError
from mixer_jax.runtime import mesh as mesh_lib

T = TypeVar("T")


def join(
  address: str | None = None,
  number: int | None = None,
  index: int | None = None,
  detect: bool = False,
) -> None:
  """Makes this process one of several; nothing if nothing is given.

  It must be called before JAX touches a device. Only the first process prints and writes then.

  Args:
    address: HOST:PORT of the first process, the same for all.
    number: of processes.
    index: of this one, from 0.
    detect: ask SLURM, Open MPI, Kubernetes or Cloud TPU for all three.

  Raises:
    UserError: the three are not all given or possible, or the processes do not find each other.
  """
  if not detect and None in (given := (address, number, index)):
    if given == (None, None, None):
      return
    raise UserError(
      "--coordinator_address, --num_processes and --process_id belong together; or --distributed"
      " alone, where SLURM, Open MPI, Kubernetes or Cloud TPU knows them"
    )
  if number is not None and index is not None and not 0 <= index < number:
    raise UserError(f"--process_id is {index}; allowed: 0 to {number - 1}")
  # Its handler of SIGTERM would take the place of that of `signals`.
  jax.config.update("jax_enable_preemption_service", False)
  # After so long a silence a process is taken for dead, and the others end.
  seconds = dict(heartbeat_timeout_seconds=30, shutdown_timeout_seconds=60)
  try:
    jax.distributed.initialize(address, number, index, **seconds)
  except (RuntimeError, ValueError) as e:
    raise UserError(f"the processes do not find each other: {first_line(e)}") from e
  if not is_first():
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (for the life of the process)
    os.environ["TQDM_DISABLE"] = "1"


def is_first() -> bool:
  """Whether this process prints and writes."""
  return jax.process_index() == 0


def lead(action: Callable[[], T]) -> T | None:
  """Calls `action` in the first process and returns its result; None in the others, which wait.

  A UserError of `action` ends all processes.
  """
  if jax.process_count() == 1:
    return action()
  result = error = None
  try:
    result = action() if is_first() else None
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
      f" ({first_line(e)}); start all again to resume from the last checkpoint"
    ) from e


class Agreement:
  """Whether any process was asked to stop, known to all of them at the same step.

  All processes call it equally often, in the same order with their other work on the devices.
  `asked` says whether this one was; the mesh has the devices of all.
  """

  def __init__(self, asked: Callable[[], bool], mesh: jax.sharding.Mesh):
    self._asked = asked
    self._split, everywhere = mesh_lib.batched(mesh), mesh_lib.replicated(mesh)
    self._any = jax.jit(lambda flags: flags.any(), out_shardings=everywhere)
    self._pending: Any = None

  def soon(self) -> bool:
    """The answer at the call before this one: no process waits for another."""
    if jax.process_count() == 1:
      return self._asked()
    known, self._pending = self._pending, self._ask(self._asked())
    return known is not None and bool(known)

  def now(self) -> bool:
    """The answer; all processes wait for each other."""
    own = self._asked()
    return own if jax.process_count() == 1 else bool(self._ask(own))

  def _ask(self, own: bool) -> jax.Array:
    flags = np.full(jax.local_device_count(), own)
    return self._any(jax.make_array_from_process_local_data(self._split, flags))


def first_line(error: Exception) -> str:
  """The first line of a library's error, which may be a page."""
  return (str(error).strip().splitlines() or [type(error).__name__])[0]
