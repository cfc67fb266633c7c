"""Our training step of Galerkin and Fourier transformers beside the published code, grid by grid.

Burgers' equation with the published sizes: 530,305 parameters, batches of 8, Adam, gradients
clipped at a norm of 0.999, 1cycle. The candidates, for each kind of attention:

  ours       the library's own step, on one batch that is on the device
  published  `SimpleTransformer`, `WeightedL2Loss` and `train_batch_burgers` of
             github.com/scaomath/galerkin-transformer (Cao, NeurIPS 2021), on a batch of random
             functions; --published names a clone, whose requirements are installed in this Python
             or in the one that --torch_python names

They live in processes of their own, as the candidates of `peers`. With --points several times the
table shows how time and memory grow with the grid.
"""

import itertools
import json
import pathlib
import statistics
import sys
import types
from typing import Any, Iterator

from benchmarks import peers

# A worker may be in a Python without JAX: only the standard library is imported above.
KINDS = ("galerkin", "fourier")
FINEST, FUNCTIONS = 8192, 1024  # points of the published set, and its training functions
LEARNING_RATE, H1, CLIP = 1e-3, 0.1, 0.999


def config_of(kind: str, points: int, batch_size: int, dtype: str) -> Any:
  """A few functions of Burgers' equation, on one device."""
  from mixer_jax import config as config_lib

  config = config_lib.default("operator_learning", "galerkin_1d")
  config.batch_size = batch_size
  config.mesh.data = 1
  config.h1 = H1
  config.model.update(attention=kind, dtype=dtype)
  config.data.update(name="burgers", train_functions=batch_size, test_functions=1)
  config.data.step = FINEST // points
  config.optimizer = config_lib.optimizer("adam", LEARNING_RATE, clip_norm=CLIP)
  config.schedule.update(name="onecycle", rise=0.2, start=1e-4, end=1e-8)
  return config


def ours(options: Any) -> peers.Calls:
  """Steps by the library, and the memory of their program, as XLA plans it."""
  from benchmarks import steps, timing
  from mixer_jax import experiment

  sizes = options.kind, options.points, options.batch_size, options.dtype
  run = experiment.build(config_of(*sizes))
  step = steps.Fixed(run, steps.batch(run)).start()
  planned = timing.peak_bytes(step)
  return {"step": step, "memory": lambda: {"bytes": planned}}


def published(options: Any) -> peers.Calls:
  """Steps by the published code; an AssertionError if its size is not ours."""
  root = pathlib.Path(options.published)
  sys.path.insert(0, str(root / "libs"))
  from ft import WeightedL2Loss
  from model import SimpleTransformer
  import torch
  from utils_ft import train_batch_burgers
  import yaml

  settings = yaml.safe_load((root / "config.yml").read_text())["ex1_burgers"]
  settings |= dict(attention_type=options.kind, xavier_init=0.01)
  device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
  model = SimpleTransformer(**settings).to(device).train()
  number = sum(p.numel() for p in model.parameters())
  assert number == options.parameters, f"{number} parameters; ours has {options.parameters}"
  rows, points = options.batch_size, options.points
  places = torch.linspace(0, 1, points).reshape(1, -1, 1).expand(rows, -1, 1).contiguous()
  draw = lambda channels: torch.randn(rows, points, channels, device=device)
  batch = dict(node=draw(1), edge=torch.ones(1), pos=places, grid=places, target=draw(2))
  optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
  schedule = torch.optim.lr_scheduler.OneCycleLR(
    optimizer, max_lr=LEARNING_RATE, div_factor=1e4, pct_start=0.2, total_steps=10**6
  )
  loss = WeightedL2Loss(regularizer=True, h=1 / points, gamma=H1)
  step = lambda: train_batch_burgers(model, loss, batch, optimizer, schedule, device, CLIP)
  return {"step": lambda: step() and None}  # it waits for the device: it returns the loss


CANDIDATES = {"ours": ours, "published": published}


def main(options: Any) -> None:
  from benchmarks import tables
  from mixer_jax.errors import UserError

  published = options.published and pathlib.Path(options.published)
  if published and not (published / "libs" / "model.py").is_file():
    raise UserError(f"--published is {options.published!r}; allowed: a clone with libs/model.py")
  for points in options.points:
    if FINEST % points:
      raise UserError(f"--points is {points}; allowed: divisors of {FINEST}")
  if published:
    found = peers.pythons(CANDIDATES, "published", options, "torch", "yaml")
  else:
    print("the published code is left out: --published names no clone of it")
    found = {"ours": sys.executable}
  titles = ("attention", "candidate", "points", "median s", "s an epoch", "x ours", "planned MiB")
  tables.show(titles, _rows(found, options), texts=2)


def _shared(kind: str, points: int, options: Any) -> dict[str, Any]:
  """The options of the workers."""
  import jax

  from mixer_jax import experiment

  batch_size = options.batch_size or 8
  run = experiment.build(config_of(kind, points, batch_size, options.dtype))
  return dict(
    kind=kind,
    points=points,
    batch_size=batch_size,
    dtype=options.dtype,
    published=options.published,
    parameters=sum(x.size for x in jax.tree.leaves(run.variable_shapes["params"])),
  )


def _rows(found: dict[str, str], options: Any) -> Iterator[list[str]]:
  """Runs the candidates of each kind and grid in turn."""
  from benchmarks.timing import ratio

  for kind, points in itertools.product(options.models or KINDS, options.points):
    shared = _shared(kind, points, options)
    with peers.running(found, shared, "benchmarks.operator_peers") as workers:
      seconds = peers.turns(workers, "step", options.rounds)
      memory = workers["ours"]("memory")["bytes"]
    for name, own in seconds.items():
      median = statistics.median(own)
      epoch = median * FUNCTIONS / shared["batch_size"]
      planned = f"{memory / 2**20:,.0f}" if name == "ours" else "-"
      times = f"{median:.4f}", f"{epoch:.1f}", f"{ratio(own, seconds['ours']):.2f}"
      yield [kind, name, f"{points:,}", *times, planned]


if __name__ == "__main__":
  peers.work(CANDIDATES, sys.argv[1], types.SimpleNamespace(**json.loads(sys.argv[2])))
