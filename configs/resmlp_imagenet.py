"""ResMLP on ImageNet, by the recipe of its paper (Touvron et al., 2022), streamed.

  python -m mixer_jax.main --config=configs/resmlp_imagenet.py[:MODEL[,RECIPE]] [--config.data.dir=DIR]

MODEL is resmlp_s12 or another all-MLP of `models.BACKBONES` for 224x224. The recipe `deit` is that of
DeiT with LAMB at 5e-3, decay 0.2 and 400 epochs: 76.6% for ResMLP-S12 in the paper.
`distilled` adds DeiT's teacher, RegNetY-16GF, whose public weights it downloads: 77.8% there.
`old_fashioned` has crops and flips alone and 90 epochs, 69.2% there; its rate is ours. Stochastic
depth of S12 and the centre of test images, nine tenths, are those that the author gives
(https://github.com/facebookresearch/deit/issues/106 and 113). The paper evaluates the parameters
themselves, this file their average: `--config.ema_decay=0` is the paper's. The images are those of
TFDS's imagenet2012, prepared in DIR. Nobody has run this file to its end.
"""

from mixer_jax import config as config_lib
from mixer_jax import recipes
from mixer_jax.errors import UserError

RECIPES = ("deit", "distilled", "old_fashioned")
TEACHER = "timm/regnety_160.deit_in1k"


def get_config(choice="resmlp_s12"):
  model, _, recipe = choice.partition(",")
  recipe = recipe or "deit"
  if recipe not in RECIPES:
    raise UserError(f"the config takes the recipe {recipe!r}; allowed: {', '.join(RECIPES)}")
  task = "distillation" if recipe == "distilled" else "image_classification"
  config = config_lib.default(task, model)
  config.data.update(name="imagenet2012", test_split="validation", pad=0, flip=True)
  config.data.update(crop="inception", smallest_crop=0.08, resize=248, image_size=224)
  config.data.update(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
  config.batch_size, config.eval_batch_size = 2048, 1024
  config.require_accelerator = True
  if recipe != "old_fashioned":
    recipes.deit(config)
    config.num_epochs = 400
    config.model.stochastic_depth = 0.05 if "s12" in model else 0.1
    config.ema_decay = 0.99996
    if recipe == "distilled":
      config.distillation.update(teacher=TEACHER, kind="hard", weight=0.5)
  else:
    config.num_epochs = 90
    config.optimizer = config_lib.optimizer(
      "lamb", learning_rate=5e-3, weight_decay=0.05, clip_norm=1.0
    )
    config.schedule.update(name="cosine", warmup_epochs=5.0)
  return config
