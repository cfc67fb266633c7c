"""Our training step of a gMLP on masked words beside PyTorch's, on this machine.

Both have the same sizes, the same number of parameters, and AdamW. The candidates:

  ours     the library's own steps: batches of the bundled text are gathered and masked inside
  pytorch  gMLP as the pseudo-code of "Pay Attention to MLPs" (Liu et al., 2021), eager, with
           `torch.optim.AdamW(foreach=True)`, on one batch whose masks were drawn beforehand;
           only with PyTorch installed in this Python or in the one that --torch_python names

They live in processes of their own, as the candidates of `peers`. A turn is `STEPS` steps, and
waits for the device after the last.
"""

import json
import statistics
import sys
import types
from typing import Any

from benchmarks import peers

# A worker may be in a Python without JAX: only the standard library is imported above.
STEPS, LEARNING_RATE, WEIGHT_DECAY = 10, 1e-3, 0.01


def config_of(model: str, batch_size: int, dtype: str, max_length: int) -> Any:
  """The bundled text, on one device, one step a call of the compiled program."""
  from mixer_jax import config as config_lib

  config = config_lib.default("masked_lm", model)
  config.batch_size, config.steps_per_dispatch = batch_size, 1
  config.mesh.data = 1
  config.model.dtype = dtype
  config.data.max_length = max_length
  config.optimizer = config_lib.optimizer("adamw", LEARNING_RATE, weight_decay=WEIGHT_DECAY)
  return config


def ours(options: Any) -> peers.Calls:
  """Steps by the library, and operations a second of products of large matrices."""
  import time

  from benchmarks import steps, train
  from mixer_jax import experiment

  run = experiment.build(
    config_of(options.model, options.batch_size, options.dtype, options.max_length)
  )
  real = steps.Real(run).start()
  product, operations = train.square_product(options.dtype, STEPS * options.operations)

  def rate():
    start = time.perf_counter()
    product()
    return {"rate": operations / (time.perf_counter() - start)}

  return {"step": lambda: real(STEPS), "product": rate}


def torch_gmlp(sizes: dict[str, int]) -> Any:
  """A gMLP in PyTorch from words [batch, tokens] and positions [batch, k] to logits.

  Dense layers and norms are in the order of their calls, the head is tied. `sizes` has hidden_dim,
  ffn_dim, num_blocks, max_length and vocab_size.
  """
  import torch
  from torch import nn

  width, tokens = sizes["hidden_dim"], sizes["max_length"]

  class Block(nn.Module):
    def __init__(self):
      super().__init__()
      self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, sizes["ffn_dim"])
      self.gate_norm = nn.LayerNorm(sizes["ffn_dim"] // 2)
      self.spatial, self.outer = nn.Linear(tokens, tokens), nn.Linear(sizes["ffn_dim"] // 2, width)
      nn.init.normal_(self.spatial.weight, std=1e-6)
      nn.init.ones_(self.spatial.bias)

    def forward(self, x):
      u, v = nn.functional.gelu(self.inner(self.norm(x))).chunk(2, dim=-1)
      v = self.spatial(self.gate_norm(v).transpose(1, 2)).transpose(1, 2)
      return x + self.outer(u * v)

  class Gmlp(nn.Module):
    def __init__(self):
      super().__init__()
      self.words = nn.Embedding(sizes["vocab_size"], width)
      nn.init.normal_(self.words.weight, std=0.02)
      self.blocks = nn.Sequential(*(Block() for _ in range(sizes["num_blocks"])))
      self.norm = nn.LayerNorm(width)
      self.bias = nn.Parameter(torch.zeros(sizes["vocab_size"]))

    def forward(self, ids, positions):
      x = self.norm(self.blocks(self.words(ids)))
      x = torch.take_along_dim(x, positions[..., None], dim=1)
      return x @ self.words.weight.T + self.bias

  return Gmlp()


def pytorch(options: Any) -> peers.Calls:
  """Steps of the gMLP in PyTorch; an AssertionError if its size is not ours."""
  import torch

  sizes, rows = options.sizes, options.batch_size
  device = "cuda" if torch.cuda.is_available() else "cpu"
  model = torch_gmlp(sizes).to(device)
  number = sum(p.numel() for p in model.parameters())
  assert number == options.parameters, f"{number} parameters; ours has {options.parameters}"
  draw = lambda most, *shape: torch.randint(most, (rows, *shape), device=device)
  ids = draw(sizes["vocab_size"], sizes["max_length"])
  positions = torch.rand(rows, sizes["max_length"], device=device).argsort(1)[:, : options.masked]
  targets = torch.take_along_dim(ids, positions, dim=1)
  optimizer = torch.optim.AdamW(
    model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, foreach=True
  )
  cast = torch.autocast(device, torch.bfloat16, enabled=options.dtype == "bfloat16")

  def step():
    for _ in range(STEPS):
      optimizer.zero_grad()
      with cast:
        logits = model(ids, positions)
      loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
      loss.backward()
      optimizer.step()
    if device == "cuda":
      torch.cuda.synchronize()

  return {"step": step}


CANDIDATES = {"ours": ours, "pytorch": pytorch}


def _shared(model: str, options: Any) -> dict[str, Any]:
  """The options of the workers of a model."""
  import jax

  from benchmarks import train
  from mixer_jax import experiment
  from mixer_jax.tasks.masked_lm import masking

  batch_size = options.batch_size or 32
  run = experiment.build(config_of(model, batch_size, options.dtype, options.max_length))
  encoder = run.task.model.encoder
  names = ("hidden_dim", "ffn_dim", "num_blocks", "max_length", "vocab_size")
  return dict(
    model=model,
    batch_size=batch_size,
    dtype=options.dtype,
    max_length=options.max_length,
    sizes={name: getattr(encoder, name) for name in names},
    parameters=sum(x.size for x in jax.tree.leaves(run.variable_shapes["params"])),
    masked=masking.most(run.config.mask_rate, options.max_length),
    operations=train.step_flops(run),
  )


def main(options: Any) -> None:
  from mixer_jax.errors import UserError

  names = options.models or ["gmlp_text_small"]
  for name in names:
    if not name.startswith("gmlp_text"):
      raise UserError(f"--models has {name!r}; PyTorch's peer is a gmlp_text_...")
  found = peers.pythons(CANDIDATES, "pytorch", options, "torch")
  for name in names:
    _compare(found, _shared(name, options), options.rounds)


def _compare(found: dict[str, str], shared: dict[str, Any], rounds: int) -> None:
  """Runs the candidates in turn and prints a table."""
  from benchmarks import tables
  from benchmarks.timing import ratio

  print(
    f"{shared['model']}, {shared['parameters']:,} parameters, batch {shared['batch_size']} of"
    f" {shared['max_length']} tokens, {shared['masked']} of them masked, {shared['dtype']}, AdamW\n"
  )
  seconds, products = {name: [] for name in found}, []
  with peers.running(found, shared, "benchmarks.text_peers") as workers:
    for i in range(rounds + 2):  # two warm up
      taken = {name: worker("step") / STEPS for name, worker in workers.items()}
      rate = workers["ours"]("product")["rate"]
      if i >= 2:
        products.append(shared["operations"] / rate)
        for name, own in taken.items():
          seconds[name].append(own)
  rows = []
  for name, own in seconds.items():
    step = statistics.median(own)
    rate = f"{shared['batch_size'] * shared['max_length'] / step:,.0f}"
    ratios = f"{ratio(own, seconds['ours']):.2f}", f"{ratio(products, own):.0%}"
    rows.append([name, f"{step:.4f}", rate, *ratios, " ".join(f"{s:.3f}" for s in own)])
  titles = ("candidate", "median s", "tokens/s", "x ours", "utilisation", "all rounds")
  tables.show(titles, rows)


if __name__ == "__main__":
  peers.work(CANDIDATES, sys.argv[1], types.SimpleNamespace(**json.loads(sys.argv[2])))
