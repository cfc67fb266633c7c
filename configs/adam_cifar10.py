"""Adam with weight decay inside the gradient, on CIFAR-10: Section 4.3 of the K-FAC study.

  python -m mixer_jax.main --config=configs/adam_cifar10.py[:s4|b4|s16|b16|b16_pt]

Batch 64, 100 epochs, learning rate 1e-3, a tenth of it from epoch 40, a hundredth from epoch 80.
`b16_pt` starts from public weights, --config.pretrained=FILE.
"""

from mixer_jax import config as config_lib
from mixer_jax import recipes


def get_config(model="b4", dataset="cifar10"):
  config = recipes.kfac_study(dataset, model)
  config.optimizer = config_lib.optimizer(
    "adam", learning_rate=1e-3, weight_decay=1e-4, decay="all"
  )
  return config
