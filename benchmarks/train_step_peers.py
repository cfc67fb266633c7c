"""Our Mixer's training step against others', side by side on this machine.

  python benchmarks/train_step_peers.py --model=mixer_s16 --batch_size=16 --dtype=float32

SGD with momentum on one batch of random images that lies on the device, and the
forward pass alone. The candidates:

  ours    `mixer_jax.steps.update`, the library's own step
  linen   the Mixer as google-research/vision_transformer describes it: Linen's
          Dense, LayerNorm and swapaxes, `optax.sgd`, one jit, donated state
  timm    timm's Mixer, `torch.optim.SGD`, eager; only with PyTorch and timm
          installed in this Python or in the one that --torch_python names

Each candidate is a process of its own. It answers one request at a time and
sleeps on a pipe otherwise, so threads that spin while they wait for work do not
take the others' cores. The candidates take turns; medians are reported, and
ratios to `ours` are medians over the rounds. --profile says where a step's time
goes, by kind of operation; parts that run at the same time count in full each.
"""

import argparse
import collections
import importlib.util
import json
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

NUM_CLASSES, LEARNING_RATE, MOMENTUM = 1000, 1e-3, 0.9


def ours(options):
  """Steps and forward passes by the library."""
  import jax
  import jax.numpy as jnp
  import numpy as np

  from mixer_jax import config as config_lib
  from mixer_jax import data, experiment, models, sharding, steps, tasks
  from mixer_jax.benchmark import fixed
  from mixer_jax.data import augment

  config = config_lib.default()
  config.batch_size = options.batch_size
  config.mesh.data = 1
  config.model = config_lib.model(options.model, dtype=options.dtype)
  config.optimizer = config_lib.optimizer("sgd", learning_rate=LEARNING_RATE, momentum=MOMENTUM)
  size = models.image_size(options.model)
  split = data.Split(
    np.zeros((options.batch_size, size, size, 3), np.uint8),
    np.arange(options.batch_size, dtype=np.int32) % NUM_CLASSES,
  )
  dataset = data.Dataset("random", split, split, tuple(map(str, range(NUM_CLASSES))))
  model = experiment.build_model(config.model, NUM_CLASSES)
  task = tasks.Classification(model, augment.ImageSpec(size))
  run = experiment.Experiment(config, sharding.make_mesh(config), dataset, task)
  totals, program = fixed.no_totals(run), fixed.make_steps(run, 1)
  batch = {"image": _images(options, jax, jnp), "label": jnp.asarray(split.labels)}
  state = steps.init_state(run)
  forward = jax.jit(lambda params, batch: task.predict(params, batch)[0])

  def step():
    nonlocal state
    state, done = program(state, totals, batch, None)
    jax.block_until_ready((state, done))

  return {
    "forward": lambda: jax.block_until_ready(forward(state.params, batch)),
    "step": step,
    "profile": lambda: _profile_jax(step),
  }


def _images(options, jax, jnp):
  from mixer_jax import models

  side = models.image_size(options.model)
  return jax.random.normal(jax.random.key(0), (options.batch_size, side, side, 3), jnp.float32)


def _profile_jax(step) -> dict[str, float]:
  """Seconds by the name that XLA gave an operation, without its number; a loop has those in it."""
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


def plain_mixer(fields, num_classes, dtype):
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


def linen(options):
  """Steps and forward passes of the plain Mixer with optax."""
  import functools

  import jax
  import jax.numpy as jnp
  import optax

  from mixer_jax import models

  model = plain_mixer(models.fields(options.model), NUM_CLASSES, options.dtype)
  tx = optax.sgd(LEARNING_RATE, momentum=MOMENTUM)
  images = _images(options, jax, jnp)
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


def timm(options):
  """Steps and forward passes of timm's Mixer in PyTorch."""
  from timm.models import mlp_mixer
  import torch

  sizes = json.loads(options.sizes)
  device = "cuda" if torch.cuda.is_available() else "cpu"
  side, batch = sizes.pop("image_size"), options.batch_size
  model = mlp_mixer.MlpMixer(
    num_classes=NUM_CLASSES,
    img_size=side,
    patch_size=sizes["patch_size"],
    num_blocks=sizes["num_blocks"],
    embed_dim=sizes["hidden_dim"],
    mlp_ratio=tuple(sizes[f"{k}_mlp_dim"] / sizes["hidden_dim"] for k in ("tokens", "channels")),
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


def work(options) -> None:
  """Answers each line, the name of a call, with its seconds, or those of its parts."""
  calls = CANDIDATES[options.worker](options)
  for line in sys.stdin:
    start = time.perf_counter()
    result = calls[line.strip()]()
    seconds = time.perf_counter() - start
    print(json.dumps(result if isinstance(result, dict) else seconds), flush=True)


class Worker:
  """A process with one candidate."""

  def __init__(self, name: str, python: str, arguments: list[str]):
    command = [python, __file__, f"--worker={name}", *arguments]
    self._process = subprocess.Popen(
      command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    self._name = name

  def __call__(self, call: str) -> float | dict[str, float]:
    print(call, file=self._process.stdin, flush=True)
    answer = self._process.stdout.readline()
    if not answer:
      sys.exit(f"error: the process of {self._name} ended; what it said is above")
    return json.loads(answer)

  def close(self) -> None:
    self._process.stdin.close()
    self._process.wait()


def has_timm(python: str) -> bool:
  """Whether PyTorch and timm are installed there."""
  if python == sys.executable:
    return all(map(importlib.util.find_spec, ("torch", "timm")))
  look = "import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, ('torch', 'timm'))))"
  return not subprocess.run([python, "-c", look]).returncode


def compare(options) -> None:
  """Runs the candidates in turn and prints a table."""
  from mixer_jax import models

  fields = models.fields(options.model)
  sizes = {k: v for k, v in fields.items() if isinstance(v, int)}
  sizes["image_size"] = models.image_size(options.model)
  shared = [f"--{k}={getattr(options, k)}" for k in ("model", "batch_size", "dtype")] + [
    f"--sizes={json.dumps(sizes)}"
  ]
  pythons = dict.fromkeys(CANDIDATES, sys.executable) | {"timm": options.torch_python}
  if not has_timm(options.torch_python):
    print("timm is left out: PyTorch and timm are not installed")
    del pythons["timm"]
  workers = {name: Worker(name, python, shared) for name, python in pythons.items()}
  print(f"{options.model}, batch {options.batch_size}, {options.dtype}, SGD with momentum")
  print("| call | candidate | median s | x ours | all rounds |\n| :-- | :-- | --: | --: | :-- |")
  for call in ("forward", "step"):
    seconds = {name: [] for name in workers}
    for i in range(options.rounds + 2):  # two warm up
      for name, worker in workers.items():
        taken = worker(call)
        if i >= 2:
          seconds[name].append(taken)
    for name, own in seconds.items():
      ratio = statistics.median(o / s for o, s in zip(own, seconds["ours"]))
      rounds = " ".join(f"{s:.3f}" for s in own)
      print(
        f"| {call} | {name} | {statistics.median(own):.4f} | {ratio:.2f} | {rounds} |", flush=True
      )
  if options.profile:
    print("\n| candidate | operations of one step | seconds | share |\n| :-- | :-- | --: | --: |")
    for name, worker in workers.items():
      parts = collections.Counter(worker("profile"))
      for kind, taken in parts.most_common(options.profile):
        print(f"| {name} | `{kind}` | {taken:.4f} | {taken / parts.total():.1%} |")
  for worker in workers.values():
    worker.close()


def main() -> None:
  parser = argparse.ArgumentParser(description="Compares training steps of Mixers.")
  parser.add_argument("--model", default="mixer_s16", help="a Mixer by name")
  parser.add_argument("--batch_size", type=int, default=16)
  parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
  parser.add_argument("--rounds", type=int, default=8, help="timed calls of each candidate")
  parser.add_argument("--profile", type=int, default=0, help="kinds of operations to list")
  parser.add_argument("--torch_python", default=sys.executable, help="a Python with torch and timm")
  parser.add_argument("--sizes", help=argparse.SUPPRESS)
  parser.add_argument("--worker", choices=CANDIDATES, help=argparse.SUPPRESS)
  options = parser.parse_args()
  work(options) if options.worker else compare(options)


if __name__ == "__main__":
  main()
