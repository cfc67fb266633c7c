"""A small Mixer and a small gMLP from scratch on CIFAR-10 and CIFAR-100.

  python -m mixer_jax.study --study=configs/studies/from_scratch.py --workdir=DIR

Images from folders: --set=data.name=folder --set=cifar10:data.dir=FOLDER10
--set=cifar100:data.dir=FOLDER100.
"""

from mixer_jax import config as config_lib
from mixer_jax import study


def config(data, model, optimizer):
  config = config_lib.default()
  config.batch_size = 128
  config.model = config_lib.model(model)
  config.data = config_lib.data(data, like=data)
  config.optimizer = config_lib.optimizer(optimizer, learning_rate=1e-3, weight_decay=0.05)
  config.schedule.update(name="cosine", warmup_epochs=5.0)
  return config


def get_study():
  return study.Study(
    title="Small models from scratch",
    config=config,
    axes={
      "data": ("cifar10", "cifar100"),
      "model": ("mixer_small", "gmlp_small"),
      "optimizer": ("adamw",),
    },
    source="a coursework on all-MLP models; no other values of it are known",
    published={
      ("cifar10", "mixer_small", "adamw"): study.Published(82.3),
      ("cifar100", "mixer_small", "adamw"): study.Published(68.8),
      ("cifar10", "gmlp_small", "adamw"): study.Published(80.2),
      ("cifar100", "gmlp_small", "adamw"): study.Published(69.7),
    },
    notes=[
      "The coursework is known by its models and these accuracies alone; optimizer, schedule,"
      " augmentation and the number of epochs are ours.",
    ],
  )


def get_config(run):
  return get_study().run_config(run)
