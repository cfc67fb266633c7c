"""DINO with a small all-MLP on small images: features without labels.

  python -m mixer_jax.main --config=configs/dino_cifar.py[:mixer|resmlp] --config.data.name=cifar10

`mixer` is a small Mixer, with which k-NN rose at every evaluation on CIFAR-10 (docs/tables.md);
`resmlp` the model of `configs/resmlp_cifar.py`. Two large views and no small ones, mild colours and a
small head make steps that two cores can take; the teacher's temperature stays at 0.04, for with 0.07
its outputs came close to uniform. The 5,000 images of the bundled sample, which are the default, are
few: with them k-NN gains little.
"""

from mixer_jax import config as config_lib
from mixer_jax.errors import UserError

MODELS = {
  "mixer": dict(
    name="mixer_small",
    patch_size=8,
    hidden_dim=64,
    num_blocks=4,
    tokens_mlp_dim=32,
    channels_mlp_dim=256,
  ),
  "resmlp": dict(
    name="resmlp_s12", patch_size=4, hidden_dim=128, num_blocks=6, channels_mlp_dim=512
  ),
}


def get_config(model="mixer"):
  if model not in MODELS:
    raise UserError(f"the config takes the model {model!r}; allowed: {', '.join(MODELS)}")
  config = config_lib.default("self_distillation", MODELS[model]["name"])
  config.model.update(MODELS[model])
  config.data.name = "sample"
  config.views.update(local=0, global_share=(0.3, 1.0), jitter=0.5, blur=(0.0, 0.0, 0.0))
  config.dino.update(out_dim=512, hidden_dim=256, bottleneck_dim=64, teacher_temperature=0.04)
  config.knn.images = 10_000
  config.num_epochs, config.batch_size, config.eval_epochs = 40, 256, 2.0
  config.optimizer = config_lib.optimizer("adamw", learning_rate=1e-3, weight_decay=0.04)
  config.schedule.update(name="cosine", warmup_epochs=1.0, end=1e-3)
  return config
