"""All fields of a run with their defaults; a config file changes what differs.

A field that is None takes the default of the model or optimizer it belongs to.
"""

from typing import Any

import ml_collections
from ml_collections import config_dict

from mixer_jax import models, optim
from mixer_jax.errors import UserError

# Value of a field that a command line has to give.
REQUIRED = "(required)"


def default() -> ml_collections.ConfigDict:
  """A config that trains Mixer-B/4 with SGD on the bundled sample."""
  config = ml_collections.ConfigDict()
  # One seed decides parameters, order of examples, augmentation and sampling.
  config.seed = 0
  config.num_epochs = 100
  # Always global: split over the devices and the accumulation steps.
  config.batch_size = 64
  # Gradients are averaged over this many parts of a batch, to save memory.
  config.accum_steps = 1
  config.eval_batch_size = 256
  # Optimizer steps per call of the compiled program, at most: the largest number up to it
  # that divides the steps of an epoch. 0: 1 on a CPU, 16 elsewhere.
  config.steps_per_dispatch = 0
  # Test accuracy in (0, 1] whose first epoch is reported; 0: none.
  config.target_accuracy = 0.0
  # Epochs between checkpoints; the last epoch is always saved.
  config.checkpoint_epochs = 1
  # When a loss or an update is not finite: stop; skip the step; or restore the last checkpoint and
  # go on in another order of examples. See docs/trust.md.
  config.on_nonfinite = "stop"
  # Refuse to start on a CPU.
  config.require_accelerator = False
  # Devices: data x model (data -1: all that are left). The batch is split over all
  # of them, parameters and optimizer state over those of the axis "model".
  config.mesh = ml_collections.ConfigDict(dict(data=-1, model=1))
  # Weights to start from: a file, an address or a name of `pretrained.CATALOG`.
  config.pretrained = ""
  # What becomes of their token mixing where the model has more or fewer tokens:
  # block_diagonal, interpolate_bilinear or interpolate_bicubic; "": refused.
  config.resize_tokens = ""
  # Normalise images otherwise than those the weights were trained on.
  config.any_normalization = False
  config.task = "classification"
  config.model = model("mixer_b4")
  config.data = data("sample")
  config.optimizer = optimizer("sgd", learning_rate=1e-3)
  config.schedule = ml_collections.ConfigDict(
    dict(
      name="constant",  # or step, cosine, linear
      warmup_epochs=0.0,
      end=0.0,  # last multiplier of cosine and linear
      epochs=(),  # of "step": multiply by factor at these epochs
      factor=0.1,
    )
  )
  return config


def model(name: str, **overrides: Any) -> ml_collections.ConfigDict:
  """The model part: a name and optional overrides of any field of any model."""
  config = ml_collections.ConfigDict(dict(name=name))
  for family_member in models.VARIANTS:
    for field, value in models.fields(family_member).items():
      if field != "num_classes" and value is not None:
        config[field] = config_dict.placeholder(type(value))
  config.update(overrides)
  return config


def optimizer(name: str, learning_rate: float, **options: Any) -> ml_collections.ConfigDict:
  """The optimizer part: a name, a learning rate and options of any optimizer."""
  config = ml_collections.ConfigDict(dict(name=name, learning_rate=learning_rate))
  config.clip_norm = 0.0  # largest global norm of the gradient; 0: any
  config.decay = "kernels"  # what weight decay applies to; or "all"
  for field, field_type in optim.config_fields().items():
    config[field] = config_dict.placeholder(field_type)
  config.update(options)
  return config


def grafted(
  magnitude: ml_collections.ConfigDict, direction: ml_collections.ConfigDict
) -> ml_collections.ConfigDict:
  """The optimizer part for `graft`: two complete optimizers."""
  return ml_collections.ConfigDict(
    dict(name="graft", magnitude=magnitude, direction=direction, scope="tensor", eps=1e-16)
  )


# Mean and standard deviation of pixels in [0, 1], as in the K-FAC study's code.
_STATISTICS = {
  "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
  "cifar100": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
}


def data(name: str, statistics: str = "cifar10") -> ml_collections.ConfigDict:
  """The data part, with the augmentation of 32x32 images."""
  mean, std = _STATISTICS[name if name in _STATISTICS else statistics]
  return ml_collections.ConfigDict(
    dict(
      # A TFDS name, "folder", "npz" or "sample" (bundled CIFAR-10 images).
      name=name,
      # TFDS data_dir, root of the folder, or npz file; "": TFDS's default.
      dir="",
      # Where decoded images are kept; "": ~/.cache/mixer_jax.
      cache_dir="",
      train_split="train",
      test_split="test",
      # Images of a source with several sizes are stored at this size.
      stored_size=0,
      # "never": decode once, into cache_dir. "always": decode each batch anew, in worker
      # processes. "auto": that for sets of more than 32 GiB decoded, or with `crop`.
      stream="auto",
      # "inception": train on random areas, of a share smallest_crop or more, as squares of
      # image_size; test on the centre, with resize as the shorter side of the image.
      crop="",
      smallest_crop=0.05,
      # Processes that decode; -1: as many as CPUs; 0: none, but a thread.
      workers=-1,
      # Images that each of them decodes ahead.
      read_ahead=64,
      # What the model sees. resize > 0 scales images first.
      image_size=32,
      resize=0,
      pad=4,  # random crop after padding, without resize
      flip=True,
      random_crop=False,  # with resize: random instead of centre crop
      mean=mean,
      std=std,
    )
  )


# Target accuracies of the K-FAC study, per data set and model.
_TARGETS = {
  "cifar10": {"s4": 0.80, "b4": 0.80, "s16": 0.70, "b16": 0.65, "b16_pt": 0.90},
  "cifar100": {"b4": 0.45, "b16": 0.40, "b16_pt": 0.70},
}


def study(dataset: str, variant: str) -> ml_collections.ConfigDict:
  """Section 4.3 of the K-FAC study, without the optimizer.

  Args:
    dataset: "cifar10" or "cifar100".
    variant: "s4" and "b4" see 32x32 images; "s16", "b16" and "b16_pt" see them
      resized to 256x256 and cropped to 224x224. "b16_pt" starts from
      `config.pretrained`, which has to be given.

  Returns:
    A config: batch 64, 100 epochs, learning rate times 0.1 at epochs 40 and 80.

  Raises:
    UserError: another variant.
  """
  if variant not in ("s4", "b4", "s16", "b16", "b16_pt"):
    raise UserError(f"the config takes the model {variant!r}; allowed: s4, b4, s16, b16, b16_pt")
  config = default()
  config.model = model(f"mixer_{variant.removesuffix('_pt')}")
  config.data = data(dataset)
  if "16" in variant:
    config.data.update(resize=256, image_size=224, pad=0)
  if variant == "b16_pt":
    config.pretrained = REQUIRED
    # Those of the public weights. The study's code keeps the data set's own, and
    # takes the exact form of GELU on Google's ImageNet-1k weights.
    config.data.update(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
  config.batch_size = 64
  config.num_epochs = 100
  config.schedule.update(name="step", epochs=(40, 80), factor=0.1)
  config.target_accuracy = _TARGETS[dataset].get(variant, 0.0)
  return config
