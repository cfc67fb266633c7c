"""Refuses configs whose values cannot mean anything, before anything is read."""

import ml_collections

from mixer_jax import config as config_lib
from mixer_jax import data, models, optim, pretrained, tasks
from mixer_jax.errors import UserError

_INFINITY = float("inf")

# Lowest and highest value that make sense, both allowed.
_RANGES = {
  "seed": (0, 2**31 - 1),
  "num_epochs": (1, _INFINITY),
  "batch_size": (1, _INFINITY),
  "accum_steps": (1, _INFINITY),
  "eval_batch_size": (1, _INFINITY),
  "steps_per_dispatch": (0, _INFINITY),
  "target_accuracy": (0, 1),
  "checkpoint_epochs": (1, _INFINITY),
  "model.num_heads": (1, _INFINITY),
  "model.ffn_dim": (1, _INFINITY),
  "model.attention_dim": (0, _INFINITY),
  "model.gate_epsilon": (0, _INFINITY),
  "model.patch_size": (1, _INFINITY),
  "model.hidden_dim": (1, _INFINITY),
  "model.num_blocks": (0, _INFINITY),
  "model.tokens_mlp_dim": (1, _INFINITY),
  "model.channels_mlp_dim": (1, _INFINITY),
  "model.dropout_rate": (0, 0.999),
  "model.stochastic_depth": (0, 0.999),
  "model.layer_norm_epsilon": (0, _INFINITY),
  "data.image_size": (1, _INFINITY),
  "data.resize": (0, _INFINITY),
  "data.pad": (0, _INFINITY),
  "data.stored_size": (0, _INFINITY),
  "data.smallest_crop": (1e-6, 1),
  "data.workers": (-1, 1024),
  "data.read_ahead": (1, _INFINITY),
}
_OPTIMIZER_RANGES = {
  "learning_rate": (0, _INFINITY),
  "clip_norm": (0, _INFINITY),
  "weight_decay": (0, _INFINITY),
  "momentum": (0, 0.99999),
  "b1": (0, 0.99999),
  "b2": (0, 0.99999999),
  "eps": (0, _INFINITY),
  "initial_accumulator": (0, _INFINITY),
  "norm_constraint": (0, _INFINITY),
  "decay_from": (0, _INFINITY),
}
_CHOICES = {
  "task": tasks.NAMES,
  "resize_tokens": ("", *pretrained.RESIZES),
  "model.dtype": ("float32", "bfloat16"),
  "model.gelu": ("tanh", "exact"),
  "data.stream": data.STREAMS,
  "data.crop": data.CROPS,
}


def check(config: ml_collections.ConfigDict) -> None:
  """Checks the fields that stand for themselves; the rest is checked in use.

  Raises:
    UserError: names the first field that is wrong, its value and what is allowed.
  """
  if config.pretrained == config_lib.REQUIRED:
    raise UserError(
      "pretrained is missing; this config starts from weights: --config.pretrained=FILE"
    )
  models.fields(config.model.name)  # an unknown name says more than its fields
  for field, (low, high) in _RANGES.items():
    _check_range(field, _value(config, field), low, high)
  for field, allowed in _CHOICES.items():
    value = _value(config, field)
    if value is not None and value not in allowed:
      raise UserError(f"{field} is {value!r}; allowed: {', '.join(allowed)}")
  _check_optimizer(config.optimizer, "optimizer")


def _check_optimizer(config: ml_collections.ConfigDict, prefix: str) -> None:
  if config.name not in optim.NAMES:
    raise UserError(f"{prefix}.name is {config.name!r}; allowed: {', '.join(optim.NAMES)}")
  for field, (low, high) in _OPTIMIZER_RANGES.items():
    _check_range(f"{prefix}.{field}", config.get(field), low, high)
  for side in ("magnitude", "direction"):
    if config.name == "graft" and config.get(side):
      _check_optimizer(config[side], f"{prefix}.{side}")


def _check_range(field: str, value: float | None, low: float, high: float) -> None:
  if value is not None and not low <= value <= high:
    allowed = f"{low} or more" if high == _INFINITY else f"{low} to {high}"
    raise UserError(f"{field} is {value}; allowed: {allowed}")


def _value(config: ml_collections.ConfigDict, path: str):
  for key in path.split("."):
    config = config.get(key)  # a run of an earlier version may lack it
  return config
