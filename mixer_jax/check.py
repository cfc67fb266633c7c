"""Refuses configs whose values cannot mean anything, before anything is read."""

from typing import Any

import ml_collections

from mixer_jax import config as config_lib
from mixer_jax import data, divergence, models, optim, pretrained, schema, tasks
from mixer_jax.data import splits
from mixer_jax.errors import UserError

_INFINITY = float("inf")
# Counts are int32 on the device.
_COUNT = 2**31 - 1
# What nobody means, and what would take hours or all memory to refuse later.
_SIDE = 2**14  # of an image, in pixels
_WIDTH = 10**6  # of a layer
_DEPTH = 1000  # blocks
# Float32's smallest normal number is 1.2e-38: a divisor below it is zero.
_TINY = 1e-37

# Lowest and highest value that make sense, both allowed.
_RANGES = {
  "seed": (0, _COUNT),
  "num_epochs": (1, _COUNT),
  "batch_size": (1, _COUNT),
  "accum_steps": (1, _COUNT),
  "eval_batch_size": (1, _COUNT),
  "steps_per_dispatch": (0, _COUNT),
  "mesh.data": (-1, _COUNT),
  "mesh.model": (1, _COUNT),
  "target_accuracy": (0, 1),
  "checkpoint_epochs": (1, _COUNT),
  "model.num_heads": (1, _WIDTH),
  "model.ffn_dim": (1, _WIDTH),
  "model.attention_dim": (0, _WIDTH),
  "model.gate_epsilon": (0, _INFINITY),
  "model.patch_size": (1, _SIDE),
  "model.hidden_dim": (1, _WIDTH),
  "model.num_blocks": (0, _DEPTH),
  "model.tokens_mlp_dim": (1, _WIDTH),
  "model.channels_mlp_dim": (1, _WIDTH),
  "model.dropout_rate": (0, 0.999),
  "model.stochastic_depth": (0, 0.999),
  "model.layer_norm_epsilon": (0, _INFINITY),
  "data.image_size": (1, _SIDE),
  "data.resize": (0, _SIDE),
  "data.pad": (0, _SIDE),
  "data.stored_size": (0, _SIDE),
  "data.smallest_crop": (1e-6, 1),
  "data.workers": (-1, 1024),
  "data.read_ahead": (1, _COUNT),
}
_OPTIMIZER_RANGES = {
  "learning_rate": (0, _INFINITY),
  "clip_norm": (0, _INFINITY),
  "weight_decay": (0, _INFINITY),
  "momentum": (0, 0.99999),
  "b1": (0, 0.99999),
  "b2": (0, 0.99999999),
  "eps": (_TINY, _INFINITY),
  "initial_accumulator": (0, _INFINITY),
  "norm_constraint": (0, _INFINITY),
  "damping": (_TINY, _INFINITY),
  "factor_decay": (0, 0.99999999),
  "factor_period": (1, _COUNT // 20),  # weight decay may wait for 20 of them
  "inverse_period": (1, _COUNT),
  "decay_from": (0, _COUNT),
}
_CHOICES = {
  "task": tasks.NAMES,
  "on_nonfinite": divergence.POLICIES,
  "resize_tokens": ("", *pretrained.RESIZES),
  "model.dtype": ("float32", "bfloat16"),
  "data.stream": data.STREAMS,
  "data.crop": data.CROPS,
  **{f"model.{field}": allowed for field, allowed in models.CHOICES.items()},
}


def check(config: ml_collections.ConfigDict) -> None:
  """Checks what can be checked without data, devices and weights; the rest is checked in use.

  Raises:
    UserError: names the first field that is wrong, its value and what is allowed.
  """
  schema.check(config)
  if config.pretrained == config_lib.REQUIRED:
    raise UserError(
      "pretrained is missing; this config starts from weights: --config.pretrained=FILE"
    )
  _check_model(config)
  for field, (low, high) in _RANGES.items():
    _check_range(field, _value(config, field), low, high)
  for field, allowed in _CHOICES.items():
    _check_choice(field, _value(config, field), allowed)
  _check_optimizer(config.optimizer, "optimizer")
  optim.schedules.check(config.schedule, config.num_epochs)
  _check_data(config.data)
  _check_patches(config)
  if config.resize_tokens and not config.pretrained:
    raise UserError(
      f"resize_tokens is {config.resize_tokens!r}, but there are no weights to resize: pretrained is ''"
    )


def _check_model(config: ml_collections.ConfigDict) -> None:
  known = models.fields(config.model.name)  # an unknown name says more than its fields
  for field, value in config.model.items():
    if value is not None and field not in (*known, "name"):
      raise UserError(
        f"model.{field} is no field of {config.model.name}; it has {', '.join(known)}"
      )


def _check_optimizer(config: ml_collections.ConfigDict, path: str) -> None:
  optim.check(config, path)
  for field, (low, high) in _OPTIMIZER_RANGES.items():
    _check_range(f"{path}.{field}", config.get(field), low, high)
  for field, allowed in optim.CHOICES.items():
    _check_choice(f"{path}.{field}", config.get(field), allowed)
  for side in ("magnitude", "direction") if config.name == "graft" else ():
    _check_optimizer(config[side], f"{path}.{side}")


def _check_data(data: ml_collections.ConfigDict) -> None:
  """The contradictions between fields of `data`."""
  if data.resize and data.resize < data.image_size:
    raise UserError(
      f"data.resize is {data.resize}; allowed: 0, or at least data.image_size, {data.image_size}"
    )
  if not data.resize and data.pad >= data.image_size:
    raise UserError(
      f"data.pad is {data.pad}; it must be less than data.image_size, {data.image_size}, or a"
      " crop may show none of the image"
    )
  if data.random_crop and not data.resize:
    raise UserError("data.random_crop is True, but crops of data.resize, which is 0")
  for field in ("train_split", "test_split"):
    splits.base_names(data[field], f"data.{field}")
  for field, low in (("mean", -1e4), ("std", 1e-4)):
    values = tuple(data[field])
    if len(values) != 3 or not all(low <= value <= 1e4 for value in values):
      raise UserError(f"data.{field} is {schema.shown(values)}; allowed: three, {low:g} to 10000")


def _check_patches(config: ml_collections.ConfigDict) -> None:
  model, size = config.model, config.data.image_size
  patch = model.get("patch_size") or models.fields(model.name)["patch_size"]
  if size % patch:
    raise UserError(
      f"data.image_size is {size}; it must be a multiple of the patch size {patch} of {model.name}"
    )


def _check_range(field: str, value: float | None, low: float, high: float) -> None:
  if value is not None and not low <= value <= high:
    open_ended = high == _INFINITY or value < low == 1 or (high == _COUNT and value < low)
    allowed = f"{low} or more" if open_ended else f"{low} to {high}"
    raise UserError(f"{field} is {schema.shown(value)}; allowed: {allowed}")


def _check_choice(field: str, value: Any, allowed: tuple[str, ...]) -> None:
  if value is not None and value not in allowed:
    raise UserError(f"{field} is {schema.shown(value)}; allowed: {', '.join(allowed)}")


def _value(config: ml_collections.ConfigDict, path: str) -> Any:
  for key in path.split("."):
    config = config.get(key)  # a run of an earlier version may lack it
  return config
