"""DINO with a small ResMLP on small images: features without labels.

  python -m mixer_jax.main --config=configs/dino_cifar.py [--config.data.name=cifar10]

Two cores train on the 5,000 images of the bundled sample, or on CIFAR-10. Small views have the size
of large ones, as the model has a fixed number of tokens; there are four, not eight. The head and the
blur are smaller than those of `configs/dino_resmlp.py`, which are made for ImageNet, and the teacher's
temperature stays at 0.04, the default of the released code, since a higher one favours uniform outputs.
"""

from mixer_jax import config as config_lib


def get_config():
  config = config_lib.default("self_distillation", "resmlp_s12")
  config.model.update(patch_size=4, hidden_dim=128, num_blocks=6, channels_mlp_dim=512)
  config.data.name = "sample"
  config.views.update(local=4, local_share=(0.1, 0.4), blur=(0.5, 0.1, 0.25), blur_radius=1.0)
  config.dino.update(out_dim=1024, hidden_dim=256, bottleneck_dim=64, teacher_temperature=0.04)
  config.num_epochs, config.batch_size, config.eval_epochs = 30, 128, 2.0
  config.optimizer = config_lib.optimizer("adamw", learning_rate=5e-4, weight_decay=0.04)
  config.schedule.update(name="cosine", warmup_epochs=3.0, end=1e-3)
  return config
