"""DINO with ResMLP-S12 on ImageNet (Caron et al., 2021; Touvron et al., 2022, Section 3).

  python -m mixer_jax.main --config=configs/dino_resmlp.py[:MODEL] --config.data.dir=DIR

DIR has the folders `train` and `val` with a folder of images a class. The settings are those of DINO
for a ViT-S with a batch of 1,024 and 300 epochs; ResMLP's paper has 62.6% k-NN and 67.5% linear for
ResMLP-S12 and says no more of its own. Small views are resized to 224x224, as the model has a fixed
number of tokens: a step costs ten forward and backward passes an image, and two of the teacher.
Unlike DINO's code this clips the norm of all gradients together and cuts views out of squares of
256x256. Nobody has run this file to its end.
"""

from mixer_jax import config as config_lib


def get_config(model="resmlp_s12"):
  config = config_lib.default("self_distillation", model)
  config.data.update(name="folder", test_split="val")
  config.data.update(stored_size=256, fit="crop", resize=256, image_size=224, flip=True)
  config.data.update(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
  config.knn.images = 100_000
  config.model.stochastic_depth = 0.1
  config.batch_size, config.eval_batch_size = 1024, 1024
  config.num_epochs, config.eval_epochs = 300, 10.0
  config.optimizer = config_lib.optimizer("adamw", learning_rate=2e-3, weight_decay=0.04)
  config.optimizer.clip_norm = 3.0
  config.schedule.update(name="cosine", warmup_epochs=10.0, end=5e-4, decay_end=10.0)  # to 0.4
  config.require_accelerator = True
  return config
