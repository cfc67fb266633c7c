"""Our Mixer's training step and forward pass beside others', on this machine.

SGD with momentum on one batch that lies on the device. The candidates:

  ours    `mixer_jax.training.step.update`, the library's own step
  linen   the Mixer as google-research/vision_transformer describes it: Linen's
          Dense, LayerNorm and swapaxes, `optax.sgd`, one jit, donated state
  timm    timm's Mixer, `torch.optim.SGD`, eager; only with PyTorch and timm
          installed in this Python or in the one that --torch_python names

Each candidate is a process of its own. It answers one request at a time and sleeps on a
pipe otherwise, so that threads that spin while they wait for work do not take the others'
cores. The profile says where a step's time goes, by kind of operation; parts that run at
the same time count in full each.
"""

import collections
import contextlib
import importlib.util
import json
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import types
from typing import Any, Callable, Iterator

# A worker may be in a Python without JAX: only the standard library is imported above.
_ROOT = pathlib.Path(__file__).parent.parent
NUM_CLASSES, LEARNING_RATE, MOMENTUM = 10, 1e-4, 0.9

# "forward" and "step" wait for the device; "profile" returns seconds by operation of a step.
Calls = dict[str, Callable[[], Any]]


def ours(options: Any) -> Calls:
  """Steps and forward passes by the library."""
  import jax

  from benchmarks import steps, train
  from mixer_jax import experiment

  config = train.config_of(options.model, "sgd", options.batch_size, options.dtype)
  run = experiment.build(config)
  batch = steps.batch(run)
  step = steps.Fixed(run, batch).start()
  forward = jax.jit(lambda variables, batch: run.task.predict(variables, batch).outputs)
  return {
    "forward": lambda: jax.block_until_ready(forward(step.state.variables, batch)),
    "step": step,
    "profile": lambda: _profile_jax(step),
  }


def _profile_jax(step: Callable[[], Any]) -> dict[str, float]:
  """Seconds by XLA's name of an operation, without its number; a loop includes its operations."""
  import jax

  with tempfile.TemporaryDirectory() as directory:
    with jax.profiler.trace(directory):
      step()
    [path] = pathlib.Path(directory).rglob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(path)).planes
  seconds = collections.Counter()
  for event in (e for plane in planes for line in plane.lines for e in line.events):
    if name := dict(event.stats).get("hlo_op"):  # an operation of a compiled program
      seconds[re.sub(r"[.\d]+$", "", name)] += event.duration_ns / 1e9
  return seconds


def plain_mixer(fields: dict[str, Any], num_classes: int, dtype: str) -> Any:
  """A Mixer in plain Linen, of the sizes that `models.fields` gives."""
  import flax.linen as nn
  import jax.numpy as jnp

  def mlp(x, width):
    hidden = nn.gelu(nn.Dense(width, dtype=dtype)(x))
    return nn.Dense(x.shape[-1], dtype=dtype)(hidden)

  class PlainMixer(nn.Module):
    @nn.compact
    def __call__(self, x):
      patch = (fields["patch_size"],) * 2
      x = nn.Conv(fields["hidden_dim"], patch, strides=patch, padding="VALID", dtype=dtype)(x)
      x = x.reshape(x.shape[0], -1, x.shape[-1])
      for _ in range(fields["num_blocks"]):
        y = jnp.swapaxes(nn.LayerNorm(dtype=dtype)(x), 1, 2)
        x = x + jnp.swapaxes(mlp(y, fields["tokens_mlp_dim"]), 1, 2)
        x = x + mlp(nn.LayerNorm(dtype=dtype)(x), fields["channels_mlp_dim"])
      x = jnp.mean(nn.LayerNorm(dtype=dtype)(x), axis=1)
      return nn.Dense(num_classes, kernel_init=nn.initializers.zeros)(x)

  return PlainMixer()


def linen(options: Any) -> Calls:
  """Steps and forward passes of the plain Mixer with optax."""
  import functools

  import jax
  import jax.numpy as jnp
  import optax

  model = plain_mixer(options.sizes, NUM_CLASSES, options.dtype)
  tx = optax.sgd(LEARNING_RATE, momentum=MOMENTUM)
  side = options.sizes["image_size"]
  images = jax.random.normal(jax.random.key(0), (options.batch_size, side, side, 3), jnp.float32)
  labels = jnp.arange(options.batch_size) % NUM_CLASSES
  params = jax.jit(model.init)(jax.random.key(0), images[:1])
  opt_state = tx.init(params)
  forward = jax.jit(model.apply)

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def update(params, opt_state, images, labels):
    def loss(params):
      logits = model.apply(params, images)
      return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    value, grads = jax.value_and_grad(loss)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value

  def step():
    nonlocal params, opt_state
    params, opt_state, value = update(params, opt_state, images, labels)
    jax.block_until_ready((params, opt_state, value))

  return {
    "forward": lambda: jax.block_until_ready(forward(params, images)),
    "step": step,
    "profile": lambda: _profile_jax(step),
  }


def timm(options: Any) -> Calls:
  """Steps and forward passes of timm's Mixer in PyTorch."""
  from timm.models import mlp_mixer
  import torch

  sizes, batch = options.sizes, options.batch_size
  side, width = sizes["image_size"], sizes["hidden_dim"]
  device = "cuda" if torch.cuda.is_available() else "cpu"
  model = mlp_mixer.MlpMixer(
    num_classes=NUM_CLASSES,
    img_size=side,
    patch_size=sizes["patch_size"],
    num_blocks=sizes["num_blocks"],
    embed_dim=width,
    mlp_ratio=tuple(sizes[f"{axis}_mlp_dim"] / width for axis in ("tokens", "channels")),
  ).to(device)
  images = torch.randn(batch, 3, side, side, device=device)
  labels = torch.arange(batch, device=device) % NUM_CLASSES
  optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
  cast = torch.autocast(device, torch.bfloat16, enabled=options.dtype == "bfloat16")
  wait = torch.cuda.synchronize if device == "cuda" else lambda: None

  def forward():
    with torch.no_grad(), cast:
      model(images)
    wait()

  def step():
    optimizer.zero_grad()
    with cast:
      loss = torch.nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    wait()

  def profile():
    with torch.profiler.profile() as profiler:
      step()
    time_of = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    return {e.key: getattr(e, time_of) / 1e6 for e in profiler.key_averages()}

  return {"forward": forward, "step": step, "profile": profile}


CANDIDATES = {"ours": ours, "linen": linen, "timm": timm}


def work(candidates: dict[str, Callable[[Any], Calls]], name: str, options: Any) -> None:
  """Answers each line, the name of a call of a candidate, with seconds: in all, or by part."""
  calls = candidates[name](options)
  for line in sys.stdin:
    start = time.perf_counter()
    result = calls[line.strip()]()
    seconds = time.perf_counter() - start
    print(json.dumps(result if isinstance(result, dict) else seconds), flush=True)


class Worker:
  """A process with one candidate, of a module that is run by `work`."""

  def __init__(self, name: str, python: str, options: dict[str, Any], module: str):
    command = [python, "-m", module, name, json.dumps(options)]
    self._process = subprocess.Popen(
      command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    self._name = name

  def __call__(self, call: str) -> Any:
    answer = ""
    with contextlib.suppress(BrokenPipeError):  # it has ended
      print(call, file=self._process.stdin, flush=True)
      answer = self._process.stdout.readline()
    if not answer:
      sys.exit(f"error: the process of {self._name} ended; its messages are above")
    return json.loads(answer)

  def close(self) -> None:
    self._process.stdin.close()
    self._process.wait()


def turns(workers: dict[str, Worker], call: str, rounds: int) -> dict[str, list[float]]:
  """Seconds of a call by worker, round by round, after two rounds that warm up."""
  seconds = {name: [] for name in workers}
  for i in range(rounds + 2):
    for name, worker in workers.items():
      taken = worker(call)
      if i >= 2:
        seconds[name].append(taken)
  return seconds


def has(python: str, *modules: str) -> bool:
  """Whether modules are installed there; a UserError if there is no such program."""
  from mixer_jax.errors import UserError  # the workers' environments may not have it

  if not shutil.which(python):
    raise UserError(f"--torch_python is {python!r}; allowed: a program")
  if python == sys.executable:
    return all(map(importlib.util.find_spec, modules))
  look = f"import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, {modules})))"
  return not subprocess.run([python, "-c", look]).returncode


def pythons(candidates: dict[str, Any], peer: str, options: Any, *modules: str) -> dict[str, str]:
  """The Python of each candidate; `peer` has its own, or is left out without its modules."""
  own = options.torch_python or sys.executable
  if has(own, *modules):
    return dict.fromkeys(candidates, sys.executable) | {peer: own}
  print(f"{peer} is left out: {' and '.join(modules)} are not installed")
  return {name: sys.executable for name in candidates if name != peer}


@contextlib.contextmanager
def running(found: dict[str, str], options: dict[str, Any], module: str) -> Iterator[dict]:
  """The workers of a module's candidates, by name, each in its Python; they end with the block."""
  workers = {name: Worker(name, python, options, module) for name, python in found.items()}
  try:
    yield workers
  finally:
    for worker in workers.values():
      worker.close()


def main(options: Any) -> None:
  from mixer_jax import models
  from mixer_jax.errors import UserError

  names = options.models or ["mixer_s16"]
  for name in names:
    if "tokens_mlp_dim" not in models.fields(name):
      raise UserError(f"--models has {name!r}; allowed: Mixers, such as mixer_s16")
  found = pythons(CANDIDATES, "timm", options, "torch", "timm")
  for model in names:
    _compare(model, found, options)


def _compare(model: str, found: dict[str, str], options: Any) -> None:
  """Runs the candidates in turn and prints a table."""
  from benchmarks import tables
  from benchmarks.timing import ratio
  from mixer_jax import models

  sizes = {k: v for k, v in models.fields(model).items() if isinstance(v, int)}
  sizes["image_size"] = models.image_size(model)
  batch_size = options.batch_size or 16
  shared = dict(model=model, batch_size=batch_size, dtype=options.dtype, sizes=sizes)
  print(f"{model}, batch {batch_size}, {options.dtype}, SGD with momentum\n")

  def rows():
    for call in ("forward", "step"):
      seconds = turns(workers, call, options.rounds)
      for name, own in seconds.items():
        all_rounds = " ".join(f"{s:.3f}" for s in own)
        times = f"{statistics.median(own):.4f}", f"{ratio(own, seconds['ours']):.2f}"
        yield call, name, *times, all_rounds

  def parts():
    for name, worker in workers.items():
      seconds = collections.Counter(worker("profile"))
      for kind, taken in seconds.most_common(options.profile):
        yield name, f"`{kind}`", f"{taken:.4f}", f"{taken / seconds.total():.1%}"

  with running(found, shared, "benchmarks.peers") as workers:
    tables.show(("call", "candidate", "median s", "x ours", "all rounds"), rows(), texts=2)
    if options.profile:
      print()
      tables.show(("candidate", "operations of one step", "seconds", "share"), parts(), texts=2)


if __name__ == "__main__":
  work(CANDIDATES, sys.argv[1], types.SimpleNamespace(**json.loads(sys.argv[2])))
