"""Fine-tuning: from a run of this library, or public weights, to another set of images.

  python -m mixer_jax.main --config=configs/transfer.py:DATASET[,MODEL[,RECIPE]] \
      --config.pretrained=RUN_OR_WEIGHTS

DATASET is cifar10, cifar100, oxford_flowers102, oxford_iiit_pet, cars196 or another name of TFDS;
sample; or folder, with --config.data.dir. MODEL is that of the weights, resmlp_s12 by default. An
empty --config.pretrained= trains from scratch, with sizes as --config.model.hidden_dim. RECIPE is

deit: SGD at 0.01 and batch 768 for 1,000 epochs at 224, without erasing and stochastic depth, else
  the recipe of pre-training: DeiT's transfer, which ResMLP's paper repeats (Touvron et al., 2021,
  https://arxiv.org/abs/2012.12877, Section 5.4; rates by its author,
  https://github.com/facebookresearch/deit/issues/45).
mixer: SGD with clipped gradients, batch 512, no decay, crops and flips alone (Tolstikhin et al., 2021,
  https://arxiv.org/abs/2105.01601, Section 3), for the steps of ViT (Dosovitskiy et al., 2021,
  Appendix B.1.1); 2,500 for sets that it leaves out. Rates were tuned there: 0.01 is one of four.
  448 pixels take --config.data.image_size=448 --config.data.resize=512
  --config.resize_tokens=block_diagonal.
small: two cores, images of 32x32, from a run, whose sizes the model has; settings of our own.

Others of use: --config.layer_decay=0.75, --config.freeze=backbone.
"""

from mixer_jax import config as config_lib
from mixer_jax import recipes
from mixer_jax.errors import UserError
from mixer_jax.pretrained import catalog

RECIPES = ("deit", "mixer", "small")
_STEPS = {"cifar10": 10_000, "cifar100": 10_000, "oxford_flowers102": 500, "oxford_iiit_pet": 500}
_SMALL = ("cifar10", "cifar100", "sample")  # images of 32x32


def get_config(choice="cifar10"):
  dataset, model, recipe, *more = choice.split(",") + [""] * (2 - choice.count(","))
  model, recipe = model or "resmlp_s12", recipe or "deit"
  if more:
    raise UserError(f"the config takes {choice!r}; allowed: DATASET[,MODEL[,RECIPE]]")
  if recipe not in RECIPES:
    raise UserError(f"the config takes the recipe {recipe!r}; allowed: {', '.join(RECIPES)}")
  config = config_lib.default(model=model)
  config.pretrained = config_lib.REQUIRED
  config.data.update(name=dataset, pad=0, flip=True)
  if dataset == "oxford_flowers102":
    config.data.train_split = "train+validation"  # 2,040 images, as the papers
  if recipe == "small":
    return _small(config)
  own = catalog.IMAGENET if "resmlp" in model else catalog.MINUS_ONE_TO_ONE
  config.data.update(image_size=224, resize=256, mean=own.mean, std=own.std)
  {"deit": _deit, "mixer": _mixer}[recipe](config)
  if dataset in _SMALL:
    config.augment.smallest_area = config.data.smallest_crop
  else:
    config.data.crop = "inception"
  return config


def _deit(config):
  recipes.deit(config)
  config.augment.erasing = 0.0
  config.data.smallest_crop = 0.08
  config.optimizer = config_lib.optimizer("sgd", learning_rate=0.01, weight_decay=1e-4)
  config.schedule.end = 1e-3
  config.update(batch_size=768, num_epochs=1000, eval_epochs=10.0, checkpoint_epochs=10.0)


def _mixer(config):
  config.optimizer = config_lib.optimizer("sgd", learning_rate=0.01, clip_norm=1.0)
  steps = _STEPS.get(config.data.name, 2500)
  config.schedule.update(name="cosine", warmup_steps=min(500, steps // 5))
  config.update(batch_size=512, num_steps=steps)


def _small(config):
  config.optimizer = config_lib.optimizer("adamw", learning_rate=1e-3, weight_decay=0.05)
  config.schedule.update(name="cosine", warmup_epochs=1.0)
  config.augment.smallest_area = 0.25
  if config.data.name not in _SMALL:
    config.data.update(stored_size=32, fit="crop")
  config.update(batch_size=64, num_epochs=20)
  return config
