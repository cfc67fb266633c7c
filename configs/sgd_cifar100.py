"""SGD with momentum on CIFAR-100: Section 4.3 of the K-FAC study.

  python -m mixer_jax.main --config=configs/sgd_cifar100.py[:s4|b4|s16|b16|b16_pt]

`sgd_cifar10.py` on the other data.
"""

import pathlib

from mixer_jax import study


def get_config(model="b4"):
  path = pathlib.Path(__file__).with_name("sgd_cifar10.py")
  return study.read_config(path, model, "cifar100")
