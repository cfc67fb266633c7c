"""A model of images that starts from public weights, or from a run of this library.

A run is one of any task with a `backbone` whose config has `model`, one of `models.VARIANTS`, and
`data` with `image_size`, `mean` and `std`.
"""

import dataclasses
import logging
import math
import os
from typing import Annotated, Any, Mapping, NamedTuple, Sequence

from flax import traverse_util
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from mixer_jax import models, options, pretrained
from mixer_jax.errors import UserError, as_user_error
from mixer_jax.options import Option, one_of
from mixer_jax.paths import remembered, user_path
from mixer_jax.pretrained import RESIZES, Normalization, Weights, fit
from mixer_jax.rundir import directory, provenance
from mixer_jax.tasks import task as task_lib

_START = 'run on images, or weights (file, address, name of the catalog), to start from; "": none'
_LOG = logging.getLogger(__name__)
# Fields of a model that are no properties of its weights: layout, precision, regularisation.
_FREE = ("scan_blocks", "remat", "dtype", "dropout_rate", "stochastic_depth", "layer_scale_init")
# Fields in which equal trees may differ a little: there the config's own win.
_APPROXIMATE = ("gelu", "layer_norm_epsilon", "gate_epsilon")


@dataclasses.dataclass(frozen=True)
class Start:
  """Fields of the config itself."""

  pretrained: Annotated[str, Option(_START)] = ""
  resize_tokens: one_of(
    'resizing of weights for another number of tokens; "": refused', ("", *RESIZES)
  ) = ""
  any_normalization: Annotated[bool, Option("normalise images otherwise than the weights' own")] = (
    False
  )


# Completing a config and starting from the weights are two calls: a file is read once.
_file = remembered(pretrained.read)


def is_run(path: str) -> bool:
  """Whether a path is a directory, and so no file, address or name of weights."""
  return bool(path) and os.path.isdir(user_path(path))


class RunModel(NamedTuple):
  """The model of a run on images, by its config."""

  task: str
  loss: str  # "" of a task without this field
  name: str  # of `models.VARIANTS`
  fields: Mapping[str, Any]  # that the config sets
  image_size: options.Size
  mean: tuple[float, ...]
  std: tuple[float, ...]


def run_model(path: str) -> RunModel:
  """The model of a run; a UserError if there is no such run, or it has no model of images."""
  match config := directory.read_config(user_path(path)):
    case {
      "task": str(task),
      "model": {"name": str(name), **own},
      "data": {"image_size": (int() | [_, _]) as size, "mean": [*mean], "std": [*std]},
    } if name in models.VARIANTS:
      given = options.given(ml_collections.ConfigDict(own))
      loss = str(config.get("loss", ""))
      return RunModel(task, loss, name, given, size, tuple(mean), tuple(std))
  raise UserError(f"{path!r} is a run of task {config['task']}, which has no model of images")


def describe(path: str) -> Weights:
  """The shapes of a run's weights, without a head; or the weights of a file.

  A UserError if there is no such run, or it has no model of images.
  """
  if not is_run(path):
    return _file(path)
  run = run_model(path)
  with as_user_error(f"the model {run.name} of {path!r}", ValueError):
    own = {k: v for k, v in run.fields.items() if k not in _FREE}
    model = models.build(run.name, 1, **own)
    images = jax.ShapeDtypeStruct((1, *options.pair(run.image_size), 3), jnp.float32)
    shapes = pretrained.beside(jax.eval_shape(model.init, jax.random.key(0), images))
  fields = {k: getattr(model, k) for k in models.fields(run.name) if k not in _FREE}
  arrays = {k: x for k, x in _flat(shapes).items() if not k.startswith("head/")}
  statistics, names = Normalization(run.mean, run.std), class_names(path)
  return Weights(path, "", "own", arrays, fields, statistics, run.name, run.image_size, names)


def class_names(path: str) -> tuple[str, ...]:
  """The names of a run's classes, from its record; () if they are not in it."""
  return provenance.class_names(user_path(path))


def read(path: str, read_run: task_lib.ReadRun) -> Weights:
  """The weights of a file, or of a run's latest checkpoint: the averaged ones if there are any."""
  weights = describe(path)
  if not is_run(path):
    _file.forget()  # they may take gigabytes
    return weights
  config, variables = read_run(path)
  params = task_lib.find(config.task)(config).backbone(variables)
  arrays = {name: np.asarray(x) for name, x in _flat(params).items()}
  return dataclasses.replace(weights, arrays=arrays)


def _flat(params: Mapping[str, Any]) -> dict[str, Any]:
  return traverse_util.flatten_dict(models.unrolled(dict(params)), sep="/")


def check(config: ml_collections.ConfigDict) -> None:
  """Raises a UserError for fields that contradict each other: `Start`'s, and sizes of patches."""
  if config.resize_tokens and not config.pretrained:
    why = "there are no weights to resize: pretrained is ''"
    raise UserError(f"resize_tokens is {config.resize_tokens!r}, but {why}")
  size, patch = config.data.image_size, 1
  if "patch_size" in models.fields(config.model.name):
    patch = options.value(models.VARIANTS, config.model, "patch_size")
  # A run to start from fixes the patch size when the config is completed.
  open_patch = is_run(config.pretrained) and config.model.get("patch_size") is None
  if not open_patch:
    check_multiple("data.image_size", size, patch, config.model.name)


def check_multiple(name: str, size: options.Size, patch: options.Size, model: str) -> None:
  """Raises a UserError if the size of the field `name` is no multiple of the patch size."""
  if any(n % side for n, side in zip(options.pair(size), options.pair(patch))):
    raise UserError(f"{name} is {size}; it must be a multiple of the patch size {patch} of {model}")


def complete(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
  """Fills in the fields of the model that its weights fix and the config leaves open.

  The config has the fields of `Start`, `model` and `data`. A UserError if the weights cannot be
  read, are of another model, or want other `mean` and `std`.
  """
  if not config.pretrained:
    return config
  config = config.copy_and_resolve_references()
  weights, data = describe(config.pretrained), config.data
  if is_run(config.pretrained):
    _check_model(config, weights)
  for name, value in weights.model_fields(data.image_size, config.resize_tokens).items():
    if name in config.model and config.model[name] is None and value is not None:
      config.model[name] = value
  if weights.num_tokens:  # told before the images are decoded
    patch = options.value(models.VARIANTS, config.model, "patch_size")
    fit.check_patches(weights.source, weights.patch_size, patch)
    old, new = weights.grid, grid(config)
    if old or weights.num_tokens != math.prod(new):
      old = old or fit.square(weights.source, weights.num_tokens)
      fit.check_grid(weights.source, old, new, config.resize_tokens)
  for name in ("mean", "std") if weights.normalization else ():
    if data[name] is None:
      data[name] = getattr(weights.normalization, name)
  if weights.normalization and not config.any_normalization:
    _check_pixels(data, weights)
  elif not weights.normalization:
    line = (
      "%s: the normalization of its pixels is not known; data.mean and data.std are not checked"
    )
    _LOG.info(line, weights.source)
  return config


def grid(config: ml_collections.ConfigDict) -> tuple[int, ...]:
  """Rows and columns of the model's patches; () of a model without patches."""
  if "patch_size" not in models.fields(config.model.name):
    return ()
  patch = options.pair(options.value(models.VARIANTS, config.model, "patch_size"))
  return tuple(n // side for n, side in zip(options.pair(config.data.image_size), patch))


def _check_model(config: ml_collections.ConfigDict, weights: Weights) -> None:
  source, model = weights.source, config.model
  if model.name != weights.model:
    raise UserError(
      f"model.name is {model.name!r}, but {source!r} has a {weights.model}; set it so"
    )
  wanted = weights.model_fields(config.data.image_size, config.resize_tokens)
  for name, value in options.given(model).items():
    if name in wanted and name not in _APPROXIMATE and value != wanted[name]:
      why = f"but {source!r} has {wanted[name]!r}; leave it out"
      raise UserError(f"model.{name} is {value!r}, {why}")


def _check_pixels(data: ml_collections.ConfigDict, weights: Weights) -> None:
  own, wanted = (tuple(data.mean), tuple(data.std)), weights.normalization
  if not np.allclose(own, (wanted.mean, wanted.std), rtol=0, atol=1e-3):
    theirs = f"{weights.source} was trained with {wanted.mean} and {wanted.std}"
    instead = "set them so, or any_normalization=True"
    raise UserError(f"data.mean and data.std are {own}, but {theirs}; {instead}")


def variables(
  config: ml_collections.ConfigDict,
  shapes: task_lib.Variables,
  read_run: task_lib.ReadRun,
  class_names: Sequence[str] = (),
) -> dict[str, Any]:
  """The variables of a model of images, shaped like `shapes`, from `config.pretrained`.

  A head for other classes than `class_names` becomes a fresh one of zeros, which is logged; where
  the names of a side are not known, their number decides. Other errors are those of `Weights.fit`.

  Args:
    shapes: "params", and "batch_stats" of a model that has them; others are left out.
  """
  weights = read(config.pretrained, read_run)
  return weights.fit_variables(shapes, config.resize_tokens, class_names, grid(config))


def params(config: ml_collections.ConfigDict, shapes: Any, read_run: task_lib.ReadRun) -> Any:
  """As `variables`, of a model that has parameters alone, with their tree in the place of all."""
  return variables(config, {"params": shapes}, read_run)["params"]
