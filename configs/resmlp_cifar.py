"""A small ResMLP on small images: the recipe of DeiT, or an old-fashioned one.

  python -m mixer_jax.main --config=configs/resmlp_cifar.py[:deit|old_fashioned]
      [--config.data.name=cifar10]

Two cores train on the 5,000 images of the bundled sample, or on CIFAR-10. `old_fashioned` has padded
crops and flips alone. `deit` has the parts of the recipe of `configs/resmlp_imagenet.py` at a lower
strength (`recipes.small_deit`): RandAugment, Mixup, random areas, erasing, label smoothing, stochastic
depth, an average of the parameters; and AdamW. Larger images, such as Imagenette's in the folders train
and val of DIR, take

  --config.data.name=folder --config.data.dir=DIR --config.data.test_split=val \
      --config.data.stored_size=64 --config.data.image_size=64 --config.model.patch_size=8 \
      --config.data.mean="(0.485, 0.456, 0.406)" --config.data.std="(0.229, 0.224, 0.225)"
"""

from mixer_jax import config as config_lib
from mixer_jax import recipes
from mixer_jax.errors import UserError

RECIPES = ("deit", "old_fashioned")


def get_config(recipe="deit"):
  if recipe not in RECIPES:
    raise UserError(f"the config takes the recipe {recipe!r}; allowed: {', '.join(RECIPES)}")
  config = config_lib.default()
  config.model = config_lib.model(
    "resmlp_s12", patch_size=4, hidden_dim=128, num_blocks=6, channels_mlp_dim=512
  )
  config.data = config_lib.data("sample")
  config.num_epochs, config.batch_size = 50, 128
  if recipe == "deit":
    recipes.small_deit(config)
  else:
    config.optimizer = config_lib.optimizer("adamw", learning_rate=5e-3, weight_decay=0.05)
    config.schedule.update(name="cosine", warmup_epochs=2.0)
  return config
