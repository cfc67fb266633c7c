"""Our training step and greedy search of a Transformer for translation beside PyTorch's.

All have the same sizes and Adam, and take one batch of sentences without padding, source and target
of `max_length` tokens. The candidates:

  transformer  the library's Transformer: its own step, and greedy search with a cache
  resmlp       likewise the ResMLP of the same width and depth, which has fewer parameters
  pytorch      `torch.nn.Transformer`, eager, `torch.optim.Adam(foreach=True)`; its greedy search runs
               the decoder on all words so far, for it has no cache; only with PyTorch installed in
               this Python or in the one that --torch_python names

They live in processes of their own, as the candidates of `peers`.
"""

import json
import statistics
import sys
import types
from typing import Any

from benchmarks import peers

# A worker may be in a Python without JAX: only the standard library is imported above.
LEARNING_RATE, B2, EPSILON = 1e-3, 0.98, 1e-9
_SIZES = ("hidden_dim", "channels_mlp_dim", "num_heads", "num_blocks", "dropout_rate", "vocab_size")


def config_of(model: str, batch_size: int, dtype: str, max_length: int) -> Any:
  """The bundled pair, on one device, in batches of one shape."""
  from mixer_jax import config as config_lib

  config = config_lib.default("translation", model)
  config.batch_size = batch_size
  config.mesh.data = 1
  config.model.dtype = dtype
  config.data.update(max_length=max_length, batch_tokens=0)
  config.optimizer = config_lib.optimizer("adam", LEARNING_RATE, b2=B2, eps=EPSILON)
  return config


def ours(options: Any, model: str) -> peers.Calls:
  """Steps and translations by the library."""
  import jax
  import numpy as np

  from benchmarks import steps
  from mixer_jax import experiment
  from mixer_jax.models import decoding

  rows, length = options.batch_size, options.max_length
  run = experiment.build(config_of(model, rows, options.dtype, length))
  words = run.task.vocabulary
  special = decoding.Special(words.bos, words.eos, words.pad)
  ids = np.random.default_rng(0).integers(len(special), words.size, (2, rows, length), np.int32)
  full = np.full(rows, length, np.int32)
  examples = dict(source=ids[0], target=ids[1], source_length=full, target_length=full)
  step = steps.Fixed(run, run.task.prepare(jax.random.key(0), examples, train=True)).start()
  translate = jax.jit(
    lambda params, ids: decoding.translate(
      run.task.model, {"params": params}, ids, ids >= 0, length=length, special=special, beams=1
    )
  )

  def decode():
    jax.block_until_ready(translate(step.state.variables["params"], ids[0]))

  return {"step": step, "decode": decode}


def torch_transformer(sizes: dict[str, Any], max_length: int) -> Any:
  """`torch.nn.Transformer` as ours: norms before branches, GELU, one embedding, sines as positions.

  Dropout is that of embeddings and of the ends of branches: not of attention, nor inside of MLPs.
  It maps words [batch, tokens] of source and target to logits; `sizes` has the names of `_SIZES`.
  """
  import torch
  from torch import nn

  width = sizes["hidden_dim"]

  class Translator(nn.Module):
    def __init__(self):
      super().__init__()
      self.words = nn.Embedding(sizes["vocab_size"], width)
      nn.init.normal_(self.words.weight, std=width**-0.5)
      self.inner = nn.Transformer(
        width,
        sizes["num_heads"],
        *[sizes["num_blocks"]] * 2,
        sizes["channels_mlp_dim"],
        dropout=sizes["dropout_rate"],
        activation="gelu",
        layer_norm_eps=1e-6,
        batch_first=True,
        norm_first=True,
      )
      for module in self.inner.modules():
        if isinstance(module, nn.MultiheadAttention):
          module.dropout = 0.0
        elif isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
          module.dropout.p = 0.0
      self.dropout = nn.Dropout(sizes["dropout_rate"])
      channel, place = torch.arange(width), torch.arange(max_length)[:, None]
      angle = place / 10000.0 ** (channel // 2 * 2 / width)
      table = torch.where(channel % 2 == 1, angle.cos(), angle.sin())
      self.register_buffer("positions", table, persistent=False)

    def embedded(self, ids):
      return self.dropout(self.words(ids) * width**0.5 + self.positions[: ids.shape[1]])

    def encode(self, ids):
      return self.inner.encoder(self.embedded(ids))

    def decode(self, ids, memory):
      mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
      return self.inner.decoder(self.embedded(ids), memory, tgt_mask=mask, tgt_is_causal=True)

    def forward(self, source, target):
      return self.decode(target, self.encode(source)) @ self.words.weight.T

  return Translator()


def pytorch(options: Any) -> peers.Calls:
  """Steps and greedy search in PyTorch; an AssertionError if its size is not ours."""
  import torch

  sizes, length = options.sizes, options.max_length
  device = "cuda" if torch.cuda.is_available() else "cpu"
  model = torch_transformer(sizes, length).to(device)
  number = sum(p.numel() for p in model.parameters())
  assert number == options.parameters, f"{number} parameters; ours has {options.parameters}"
  draw = lambda: torch.randint(3, sizes["vocab_size"], (options.batch_size, length), device=device)
  source, target, following = draw(), draw(), draw()
  optimizer = torch.optim.Adam(
    model.parameters(), lr=LEARNING_RATE, betas=(0.9, B2), eps=EPSILON, foreach=True
  )
  cast = torch.autocast(device, torch.bfloat16, enabled=options.dtype == "bfloat16")
  wait = torch.cuda.synchronize if device == "cuda" else lambda: None
  entropy = torch.nn.CrossEntropyLoss(label_smoothing=0.1)

  def step():
    model.train()
    optimizer.zero_grad()
    with cast:
      logits = model(source, target)
    entropy(logits.flatten(0, 1).float(), following.flatten()).backward()
    optimizer.step()
    wait()

  @torch.no_grad()
  def decode():
    model.eval()
    with cast:
      memory, found = model.encode(source), target[:, :1]
      for _ in range(length - 1):
        last = model.decode(found, memory)[:, -1] @ model.words.weight.T
        found = torch.cat([found, last.argmax(-1, keepdim=True)], dim=1)
    wait()

  return {"step": step, "decode": decode}


CANDIDATES = {
  "transformer": lambda options: ours(options, f"transformer_translate_{options.size}"),
  "resmlp": lambda options: ours(options, f"resmlp_translate_{options.size}"),
  "pytorch": pytorch,
}


def _shared(size: str, options: Any) -> dict[str, Any]:
  """The options of the workers: "6", "12" or "small" blocks."""
  import jax

  from mixer_jax import experiment

  batch_size = options.batch_size or 32
  name = f"transformer_translate_{size}"
  run = experiment.build(config_of(name, batch_size, options.dtype, options.max_length))
  return dict(
    size=size,
    batch_size=batch_size,
    dtype=options.dtype,
    max_length=options.max_length,
    sizes={name: getattr(run.task.model, name) for name in _SIZES},
    parameters=sum(x.size for x in jax.tree.leaves(run.variable_shapes["params"])),
  )


def main(options: Any) -> None:
  from mixer_jax.errors import UserError

  names = options.models or ["transformer_translate_small"]
  for name in names:
    if not name.startswith("transformer_translate_"):
      raise UserError(f"--models has {name!r}; PyTorch's peer is a transformer_translate_...")
  found = peers.pythons(CANDIDATES, "pytorch", options, "torch")
  for name in names:
    _compare(found, _shared(name.rpartition("_")[2], options), options.rounds)


def _compare(found: dict[str, str], shared: dict[str, Any], rounds: int) -> None:
  """Runs the candidates in turn and prints a table."""
  from benchmarks import tables
  from benchmarks.timing import ratio

  sentences, length = shared["batch_size"], shared["max_length"]
  print(
    f"Transformer of {shared['parameters']:,} parameters, {sentences} sentences of {length} tokens,"
    f" {shared['dtype']}, Adam\n"
  )

  def rows():
    for call in ("step", "decode"):
      seconds = peers.turns(workers, call, rounds)
      for name, own in seconds.items():
        median, over_ours = statistics.median(own), ratio(own, seconds["transformer"])
        rates = f"{sentences / median:,.1f}", f"{sentences * length / median:,.0f}"
        yield call, name, f"{median:.4f}", *rates, f"{over_ours:.2f}"

  titles = ("call", "candidate", "median s", "sentences/s", "target tokens/s", "x ours")
  with peers.running(found, shared, "benchmarks.translation_peers") as workers:
    tables.show(titles, rows(), texts=2)


if __name__ == "__main__":
  peers.work(CANDIDATES, sys.argv[1], types.SimpleNamespace(**json.loads(sys.argv[2])))
