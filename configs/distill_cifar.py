"""The small ResMLP of `configs/resmlp_cifar.py` learns from a teacher.

  python -m mixer_jax.main --config=configs/distill_cifar.py[:hard|soft|consistent] \
      --config.distillation.teacher=RUN [--config.data.name=cifar10]

RUN is the directory of a run of image classification on the same classes, such as one of
`configs/resnet_cifar.py`. The recipe of labels and images is that of `configs/resmlp_cifar.py:deit`;
"hard" is DeiT's own distillation, "soft" has DeiT's numbers, and "consistent" sees no labels.
"""

from mixer_jax import config as config_lib
from mixer_jax import recipes
from mixer_jax.errors import UserError

KINDS = {
  "hard": dict(weight=0.5),
  "soft": dict(weight=0.1, temperature=3.0),
  "consistent": dict(temperature=2.0),
}


def get_config(kind="hard"):
  if kind not in KINDS:
    raise UserError(f"the config takes the kind {kind!r}; allowed: {', '.join(KINDS)}")
  config = config_lib.default("distillation")
  config.model = config_lib.model(
    "resmlp_s12", patch_size=4, hidden_dim=128, num_blocks=6, channels_mlp_dim=512
  )
  config.data = config_lib.data("sample")
  config.num_epochs, config.batch_size = 50, 128
  recipes.small_deit(config)
  config.distillation.update(kind=kind, **KINDS[kind])
  return config
