"""A small ResMLP with UperNet tells discs, squares and triangles apart, pixel by pixel.

  python -m mixer_jax.main --config=configs/segmentation.py[:adamw|kfac]

The images are generated from a seed; two cores train in a few minutes.
"""

from mixer_jax import config as config_lib
from mixer_jax.errors import UserError

OPTIMIZERS = {
  "adamw": dict(learning_rate=2e-3, weight_decay=0.01),
  "kfac": dict(learning_rate=0.02, damping=1e-2),
}


def get_config(optimizer="adamw"):
  if optimizer not in OPTIMIZERS:
    allowed = ", ".join(OPTIMIZERS)
    raise UserError(f"the config takes the optimizer {optimizer!r}; allowed: {allowed}")
  config = config_lib.default("segmentation", "resmlp_s12")
  config.model.update(patch_size=8, hidden_dim=96, num_blocks=4, channels_mlp_dim=192)
  config.decoder.width = 32
  config.data.update(name="shapes", image_size=64, smallest_scale=0.75, largest_scale=1.5)
  config.batch_size, config.num_epochs, config.eval_epochs = 16, 20, 2.0
  config.optimizer = config_lib.optimizer(optimizer, **OPTIMIZERS[optimizer])
  config.schedule.update(name="cosine", warmup_epochs=1.0)
  return config
