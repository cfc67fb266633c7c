"""Equations solved by jinns, by DeepXDE and by us: the error over time, on one core, in float64.

The net (tanh), its first parameters, the points, the loss and the time are the same for all; see
`physics_problems`. Each package has the optimizers that its documents name for accuracy:

  jinns_natural_gradient  `jinns.optimizers.vanilla_ngd()`, with its own damping and line search
  jinns_ssbroyden         `jinns.optimizers.scale_by_SSBroyden_family()`, zoom line search
  deepxde_adam            Adam at 1e-3 on the JAX backend, which has no other optimizer for accuracy
  deepxde_adam_lbfgs      Adam at 1e-3, then L-BFGS, as its examples; on the PyTorch backend
  ours_adam_lbfgs         `optim.in_turn` of Adam at 1e-3 and L-BFGS
  ours_ssbroyden          `optim.ssbroyden`
  ours_gauss_newton       `optim.gauss_newton` with momentum 0.5 and acceleration

Each runs in a process of its own, peers in the Python that --peers_python names, and prints a JSON
object an evaluation. `seconds` are those of training, without evaluations and without
`setup_seconds`: imports, tracing and compilation, up to the end of the first update. `updates` of our
quasi-Newton methods are of 10 iterations each, others of one. `error` is the relative L2 error,
`loss` that of training.
"""

import functools
import json
import os
import subprocess
import sys
import time
import types
from typing import Any, Callable

import numpy as np

from benchmarks import physics_problems

# A peer's Python has no mixer_jax: nothing of it is imported above.
ADAM_RATE = 1e-3
_ONE_CORE = {
  "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
  "OMP_NUM_THREADS": "1",
  "OPENBLAS_NUM_THREADS": "1",
  "JAX_PLATFORMS": "cpu",
}


class Record:
  """The clock of a candidate, which stands still during evaluations, and its rows."""

  def __init__(self, candidate: str, options: Any):
    self._problem = physics_problems.of(options.problem, options.seed)
    self._told = dict(candidate=candidate, problem=options.problem, hidden=options.hidden)
    self._budget, self._every = options.seconds, options.seconds / 20
    self._start, self._setup, self._next = time.perf_counter(), None, 0.0
    self.updates = 0

  @property
  def seconds(self) -> float:
    """Of training."""
    return time.perf_counter() - self._start

  def due(self) -> bool:
    """Counts an update; whether an evaluation follows."""
    if self._setup is None:
      self._setup = self.seconds
      self._start = time.perf_counter()
    self.updates += 1
    return self.seconds >= min(self._next, self._budget)

  def row(self, values: Callable[[np.ndarray], Any], loss: Callable[[], Any]) -> bool:
    """Prints the evaluation of a function of points; whether time is up."""
    begin, seconds = time.perf_counter(), self.seconds
    self._next = seconds + self._every
    row = self._told | dict(seconds=round(seconds, 3), updates=self.updates)
    row |= dict(error=self._problem.error(values(self._problem.tested)), loss=float(loss()))
    print(json.dumps(row | dict(setup_seconds=round(self._setup, 2))), flush=True)
    self._start += time.perf_counter() - begin
    return seconds >= self._budget

  @property
  def problem(self) -> physics_problems.Problem:
    return self._problem


def layers_of(options: Any) -> list[tuple[np.ndarray, np.ndarray]]:
  return physics_problems.initial_layers([2, *options.hidden, 1], options.seed)


def tanh_net(layers: Any, x: Any, tanh: Callable[[Any], Any] = np.tanh) -> Any:
  """The net's outputs [..., 1] of points [..., 2]."""
  *hidden, (kernel, bias) = layers
  for weights, shift in hidden:
    x = tanh(x @ weights + shift)
  return x @ kernel + bias


def ours(options: Any, record: Record, make: Callable[..., Any]) -> None:
  """An optimizer of ours, made of `mixer_jax.optim`, the options and a function to a `Curvature`."""
  import jax
  import jax.numpy as jnp
  import optax

  from mixer_jax import optim

  problem = record.problem
  points, values = (jax.tree.map(jnp.asarray, x) for x in (problem.points, problem.values))

  def residual(layers, point):
    u = lambda p: tanh_net(layers, p, jnp.tanh)[0]
    along = lambda p, axis: jax.jvp(u, (p,), (jnp.eye(2)[axis],))[1]
    twice = lambda axis: jax.jvp(lambda p: along(p, axis), (point,), (jnp.eye(2)[axis],))
    if problem.name == "poisson":
      return twice(0)[1] + twice(1)[1] + 2 * jnp.pi**2 * jnp.prod(jnp.sin(jnp.pi * point))
    first, second = twice(1)
    return along(point, 0) + u(point) * first - physics_problems.VISCOSITY * second

  def residuals(layers, batch):
    points, values = batch
    inside = jax.vmap(residual, (None, 0))(layers, points["interior"])
    at = lambda name: tanh_net(layers, points[name], jnp.tanh) - values[name]
    return {"interior": inside[:, None]} | {name: at(name) for name in values}

  batch = points, values
  loss = lambda layers: sum(jnp.mean(r**2) for r in residuals(layers, batch).values())
  layers = jax.tree.map(jnp.asarray, layers_of(options))
  likelihood = dict.fromkeys(("interior", *values), "normal")
  curvature = lambda: optim.Curvature(residuals, layers, batch, likelihood=likelihood)
  tx = make(optim, options, curvature)

  @functools.partial(jax.jit, donate_argnums=1)
  def update(layers, state):
    value, grads = jax.value_and_grad(loss)(layers)
    moved, state = tx.update(grads, state, layers, batch=batch, value=value, value_fn=loss)
    return optax.apply_updates(layers, moved), state

  loss_of = jax.jit(loss)
  state, over = tx.init(layers), False
  while not over:
    layers, state = jax.block_until_ready(update(layers, state))
    if record.due():
      over = record.row(lambda x: tanh_net(layers, x), lambda: loss_of(layers))


def _ours(make: Callable[..., Any]) -> Callable[[Any, Record], None]:
  def run(options, record):
    import jax

    jax.config.update("jax_enable_x64", True)
    ours(options, record, make)

  return run


def _adam_lbfgs(optim: Any, options: Any, curvature: Any) -> Any:
  """With as many pairs as DeepXDE keeps."""
  then = optim.lbfgs(memory_size=100, iterations=10)
  return optim.in_turn([optim.adam(ADAM_RATE), then], [options.adam_steps])


def _gauss_newton(optim: Any, options: Any, curvature: Any) -> Any:
  return optim.gauss_newton(curvature(), momentum=0.5, acceleration=True, max_rows=20_000)


def _jinns(optimizer: str) -> Callable[[Any, Record], None]:
  def run(options, record):
    from benchmarks import physics_jinns

    physics_jinns.run(options, record, optimizer)

  return run


def _deepxde(backend: str) -> Callable[[Any, Record], None]:
  def run(options, record):
    os.environ["DDE_BACKEND"] = backend
    from benchmarks import physics_deepxde

    physics_deepxde.run(options, record, backend)

  return run


CANDIDATES = {
  "jinns_natural_gradient": _jinns("natural_gradient"),
  "jinns_ssbroyden": _jinns("ssbroyden"),
  "deepxde_adam": _deepxde("jax"),
  "deepxde_adam_lbfgs": _deepxde("pytorch"),
  "ours_adam_lbfgs": _ours(_adam_lbfgs),
  "ours_ssbroyden": _ours(lambda optim, options, _: optim.ssbroyden(iterations=10)),
  "ours_gauss_newton": _ours(_gauss_newton),
}


def main(options: Any) -> None:
  """Runs the candidates one after another and passes their rows on."""
  from benchmarks import peers
  from mixer_jax.errors import UserError

  chosen = options.candidates or list(CANDIDATES)
  for flag, given, allowed in (
    ("candidates", chosen, CANDIDATES),
    ("problems", options.problems, physics_problems.PROBLEMS),
  ):
    if unknown := [name for name in given if name not in allowed]:
      raise UserError(f"--{flag} has {unknown[0]!r}; allowed: {', '.join(allowed)}")
  python = options.peers_python or sys.executable
  for problem in options.problems:
    for name in chosen:
      package = name.partition("_")[0]
      if package != "ours" and not peers.has(python, package):
        print(f"{name} is left out: {package} is not installed", file=sys.stderr)
        continue
      shared = dict(problem=problem, hidden=[int(n) for n in options.hidden], seed=0)
      shared |= dict(seconds=options.seconds, adam_steps=options.adam_steps)
      _run(sys.executable if package == "ours" else python, name, shared)


def _run(python: str, candidate: str, shared: dict[str, Any]) -> None:
  """Prints the rows of a process; packages print much else."""
  command = [python, "-m", "benchmarks.physics_peers", candidate, json.dumps(shared)]
  environment = os.environ | _ONE_CORE
  with subprocess.Popen(
    command, stdout=subprocess.PIPE, text=True, env=environment, stderr=subprocess.PIPE
  ) as process:
    for line in process.stdout:
      if line.startswith('{"candidate"'):
        print(line, end="", flush=True)
    errors = process.stderr.read()
  if process.returncode:
    last = errors.strip().rpartition("\n")[2]
    print(f"{candidate} ended with an error: {last}", file=sys.stderr)


if __name__ == "__main__":
  core = max(os.sched_getaffinity(0))
  os.sched_setaffinity(0, {core})
  given = types.SimpleNamespace(**json.loads(sys.argv[2]))
  CANDIDATES[sys.argv[1]](given, Record(sys.argv[1], given))
