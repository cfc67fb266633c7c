"""Published settings that several configs share."""

from ml_collections import ConfigDict

from mixer_jax import config as config_lib
from mixer_jax.errors import UserError

# Target accuracies of the K-FAC study, per data set and model.
_TARGETS = {
  "cifar10": {"s4": 0.80, "b4": 0.80, "s16": 0.70, "b16": 0.65, "b16_pt": 0.90},
  "cifar100": {"b4": 0.45, "b16": 0.40, "b16_pt": 0.70},
}


def kfac_study(dataset: str, variant: str) -> ConfigDict:
  """Section 4.3 of the K-FAC study on "cifar10" or "cifar100", without the optimizer.

  Batch 64, 100 epochs, learning rate times 0.1 at epochs 40 and 80. "s4" and "b4" see 32x32 images;
  "s16", "b16" and "b16_pt" see them resized to 256x256 and cropped to 224x224. "b16_pt" starts from
  `config.pretrained`, which has to be given. Another variant is a UserError.
  """
  if variant not in ("s4", "b4", "s16", "b16", "b16_pt"):
    raise UserError(f"the config takes the model {variant!r}; allowed: s4, b4, s16, b16, b16_pt")
  config = config_lib.default(model=f"mixer_{variant.removesuffix('_pt')}")
  config.data = config_lib.data(dataset, like=dataset)
  if "16" in variant:
    config.data.update(resize=256, image_size=224, pad=0)
  if variant == "b16_pt":
    config.pretrained = config_lib.REQUIRED
    # The public weights' own. The study keeps those of the data set, and takes the exact GELU.
    config.data.update(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
  config.schedule.update(name="step", epochs=(40, 80), factor=0.1)
  config.update(batch_size=64, num_epochs=100, target=_TARGETS[dataset].get(variant, 0.0))
  return config


def deit(config: ConfigDict) -> None:
  """Sets the recipe of DeiT for labels, images and schedule in a config of image classification.

  Touvron et al., 2021, https://arxiv.org/abs/2012.12877, Table 9, with the ends of the schedule in
  deit's code. The optimizer is that of ResMLP: LAMB, gradients of a norm of 1 at most, as in apex.
  Crops of the image, stochastic depth, the batch and the decay of averaged parameters are left to
  the config.
  """
  config.label_smoothing = 0.1
  config.data.repeats = 3
  config.augment.update(policy="rand", operations=2, magnitude=9.0, magnitude_noise=0.5)
  config.augment.update(mixup=0.8, cutmix=1.0, switch=0.5, mix="batch", erasing=0.25)
  config.optimizer = config_lib.optimizer(
    "lamb", learning_rate=5e-3, weight_decay=0.2, clip_norm=1.0
  )
  config.schedule.update(name="cosine", warmup_epochs=5.0, end=2e-3)


def small_deit(config: ConfigDict) -> None:
  """Sets the parts of `deit` at a strength for 50 to 100 epochs of small images.

  DeiT's own strength is for 300 epochs of ImageNet. AdamW, as in DeiT itself, takes the place of
  LAMB, whose rate is for large batches. Areas and shares are drawn for each
  example. Parameters are averaged over about 50 steps: an average over 500 still has much of the
  initial ones.
  """
  deit(config)
  config.optimizer = config_lib.optimizer("adamw", learning_rate=5e-3, weight_decay=0.05)
  config.data.update(pad=0, repeats=1)
  config.augment.update(operations=1, magnitude=5.0, mixup=0.1, cutmix=0.0, mix="example")
  config.augment.update(smallest_area=0.35, erasing=0.1)
  config.model.stochastic_depth, config.ema_decay = 0.05, 0.98
  config.schedule.warmup_epochs = 2.0
