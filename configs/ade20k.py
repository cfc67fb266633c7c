"""ADE20K by a public ResMLP with UperNet, at the published size.

  python -m mixer_jax.main --config=configs/ade20k.py[:MODEL] --config.data.dir=DIR \
      --config.pretrained=WEIGHTS

DIR has images/{training,validation} and annotations/{training,validation}, as the scene parsing
benchmark's ADEChallengeData2016. ResMLP's paper (Touvron et al., 2022) reports a mean IoU of 35.9,
39.1 and 42.5 for S12, S24 and B24. The recipe is that of XCiT's code for plain backbones: AdamW at
6e-5, 160,000 steps of 16 crops, a second head; ours differ in the decoder's norms and in crops of
224, at which the weights' layers over tokens fit. Nobody has run this file to its end.
"""

from mixer_jax import config as config_lib


def get_config(model="resmlp_s12"):
  config = config_lib.default("segmentation", model)
  config.pretrained = config_lib.REQUIRED
  config.model.stochastic_depth = 0.05
  config.decoder.auxiliary = 0.4
  config.data.update(name="folder", void=0, train_split="training", test_split="validation")
  config.data.update(canvas=(512, 683), image_size=224)
  config.data.update(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
  config.batch_size, config.eval_batch_size = 16, 8
  config.num_steps, config.eval_steps, config.checkpoint_steps = 160_000, 16_000, 4_000
  config.optimizer = config_lib.optimizer("adamw", learning_rate=6e-5, weight_decay=0.01)
  config.schedule.update(name="linear", warmup_steps=1_500)
  config.require_accelerator = True
  return config
