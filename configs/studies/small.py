"""Tables 2 and 4 of the K-FAC study in small: CIFAR-10 on two CPU cores.

  python -m mixer_jax.study --study=configs/studies/small.py --workdir=DIR \
      --set=data.dir=FOLDER --parallel=2

FOLDER holds all of CIFAR-10 as FOLDER/{train,test}/CLASS/IMAGE.{jpg,png}. Its 42
runs take a little over two hours of one core.
"""

from mixer_jax import config as config_lib
from mixer_jax import study

# After the paper's S/4 and S/16: 32x32 images with small patches, and the same
# images resized, in the paper's ratio of 256 to 224, with large patches.
_MODELS = {
  "mini8": dict(patch_size=8),
  "mini16": dict(patch_size=16),
}
_IMAGES = {
  "mini8": dict(image_size=32),
  "mini16": dict(image_size=64, resize=73, pad=0),
}
# Settings picked by hand: the K-FAC study's are made for 78,000 steps.
_OPTIMIZERS = {
  "sgd": dict(learning_rate=0.1, weight_decay=1e-4),
  "adam": dict(learning_rate=1e-3, weight_decay=1e-4),
  "kfac": dict(
    learning_rate=0.02, damping=1e-3, weight_decay=1e-4, factor_decay=0.8, inverse_period=20
  ),
}


def config(model, optimizer):
  config = config_lib.default()
  config.num_epochs = 4
  config.model = config_lib.model(
    "mixer_small",
    hidden_dim=128,
    num_blocks=4,
    tokens_mlp_dim=64,
    channels_mlp_dim=512,
    **_MODELS[model],
  )
  config.data = config_lib.data("folder", like="cifar10")
  config.data.update(train_split="train[:50%]", **_IMAGES[model])
  sides = [config_lib.optimizer(name, **_OPTIMIZERS[name]) for name in optimizer.split("_")]
  config.optimizer = config_lib.grafted(*sides) if len(sides) == 2 else sides[0]
  config.schedule.update(name="cosine", warmup_epochs=0.5)
  config.target = 0.5
  return config


def get_study():
  return study.Study(
    title="Tables 2 and 4 in small, on CIFAR-10",
    config=config,
    axes={
      "model": tuple(_MODELS),
      "optimizer": ("sgd", "adam", "kfac", "sgd_sgd", "sgd_kfac", "kfac_sgd", "kfac_kfac"),
    },
    notes=[
      "Two Mixers of 128 channels and 4 blocks: mini8 sees 32x32 images in 8x8 patches, mini16 the"
      " same images resized to 73x73 and cropped to 64x64 in 16x16 patches. They train for four epochs"
      " of 25,000 images and are tested on all 10,000. The settings of the optimizers were found by"
      " hand and not with equal budgets (the tuned study has equal ones).",
    ],
  )


def get_config(run):
  return get_study().run_config(run)
