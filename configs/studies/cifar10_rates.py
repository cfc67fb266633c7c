"""Section 4.3 of the K-FAC study: its grid of learning rates and weight decays.

python -m mixer_jax.study --study=configs/studies/cifar10_rates.py --workdir=DIR
"""

import pathlib

from mixer_jax import study

_CONFIGS = pathlib.Path(__file__).parent.parent


def config(model, optimizer, learning_rate, weight_decay):
  config = study.read_config(_CONFIGS / f"{optimizer}_cifar10.py", model)
  config.optimizer.learning_rate = float(learning_rate.removeprefix("lr"))
  config.optimizer.weight_decay = float(weight_decay.removeprefix("wd"))
  return config


def get_study():
  return study.Study(
    title="Learning rate and weight decay on CIFAR-10",
    config=config,
    axes={
      "model": ("s4", "s16"),
      "optimizer": ("sgd", "adam", "kfac"),
      "learning_rate": ("lr1e-2", "lr1e-3"),
      "weight_decay": ("wd1e-3", "wd1e-4"),
    },
    seeds=(0,),
    lines=("learning_rate", "weight_decay"),
    source="Hosseini, Zhou, Chen (2022), Section 4.3",
    notes=[
      "The paper prints no accuracies of its grid and does not name its model. It states that the"
      " weight decay 1e-4 worked best for all, the learning rate 1e-2 for SGD and 1e-3 for Adam and"
      " K-FAC.",
    ],
  )


def get_config(run):
  return get_study().run_config(run)
