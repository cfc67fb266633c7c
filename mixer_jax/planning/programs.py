"""The programs of a run, compiled for devices that need not be there."""

import time
from typing import Any, NamedTuple

import jax
import numpy as np

from mixer_jax.data import feed
from mixer_jax.errors import reason
from mixer_jax.experiment import Experiment
from mixer_jax.planning import operations
from mixer_jax.planning.targets import Target
from mixer_jax.runtime import mesh as mesh_lib
from mixer_jax.training import evaluator, trainer
from mixer_jax.training import step as step_lib
from mixer_jax.training.state import evaluation_variables, state_shapes


class Compiled(NamedTuple):
  """What the compiler says about a program; bytes are those of a device.

  Attributes:
    name: of the program.
    seconds: to trace, lower and compile it.
    arguments: bytes of the state, the data and all else that goes in.
    results: bytes of what comes out and does not take the place of an argument.
    temporaries: bytes in between.
    steps: in one call.
    program: its operations in one call.
    refused: the compiler's words if it does not fit into the memory; then the rest is empty.
  """

  name: str
  seconds: float
  arguments: int = 0
  results: int = 0
  temporaries: int = 0
  steps: int = 1
  program: operations.Program = operations.Program([], 0)
  refused: str = ""

  @property
  def bytes(self) -> int:
    return self.arguments + self.results + self.temporaries


def training(run: Experiment, target: Target | None = None) -> Compiled:
  """The program of training: some steps, as a run makes them in one call."""
  train, order = run.datasets["train"], run.order
  batched = mesh_lib.batched(run.mesh)
  steps = trainer.window(run, _hosts(run))
  window = feed.window_shapes(train, batched, steps, order.batch_size)
  program = step_lib.make_train_steps(run)
  return _compiled("training", program, target, steps, state_shapes(run), *window)


def evaluation(run: Experiment, target: Target | None = None) -> Compiled:
  """The program that evaluates one batch of the test set."""
  test = run.datasets["test"]
  batched, whole = mesh_lib.batched(run.mesh), mesh_lib.replicated(run.mesh)
  size = evaluator.batch_size(run, len(test))
  window = feed.window_shapes(test, batched, 1, size)
  mask = jax.ShapeDtypeStruct((size,), bool, sharding=whole)
  number = jax.ShapeDtypeStruct((), np.int32, sharding=whole)
  program = evaluator.program(run, lambda *args: dict(run.task.evaluate(*args)))
  variables = evaluation_variables(state_shapes(run).variables)
  return _compiled("evaluation", program, target, 1, variables, *window, mask, number)


def _hosts(run: Experiment) -> int:
  return len({device.process_index for device in run.mesh.devices.flat})


def _compiled(
  name: str, program: Any, target: Target | None, steps: int, *arguments: Any
) -> Compiled:
  start = time.perf_counter()
  platforms = {} if target is None else {"lowering_platforms": (target.platform,)}
  try:
    lowered = program.trace(*arguments).lower(**platforms)
    compiled = _compile(lowered, target)
  except jax.errors.JaxRuntimeError as e:
    if "RESOURCE_EXHAUSTED" not in str(e):
      raise
    return Compiled(name, time.perf_counter() - start, steps=steps, refused=reason(e))
  seconds, memory = time.perf_counter() - start, compiled.memory_analysis()
  results = memory.output_size_in_bytes - memory.alias_size_in_bytes
  sizes = memory.argument_size_in_bytes, results, memory.temp_size_in_bytes
  return Compiled(name, seconds, *sizes, steps, operations.read(compiled.as_text()))


def _compile(lowered: Any, target: Target | None) -> Any:
  """Compiles a program, for GPUs without Triton's products where these do not compile.

  Without a device XLA cannot try tiles out, and for some shapes it picks some that do not work.
  """
  if target is None or target.platform != "cuda":
    return lowered.compile()
  options = {"xla_gpu_autotune_level": 0}
  try:
    return lowered.compile(compiler_options=options)
  except jax.errors.JaxRuntimeError as e:
    if "tile sizes" not in str(e):
      raise
    return lowered.compile(compiler_options=options | {"xla_gpu_enable_triton_gemm": False})
