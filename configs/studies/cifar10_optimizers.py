"""Table 2 of the K-FAC study: SGD, Adam and K-FAC on CIFAR-10.

  python -m mixer_jax.study --study=configs/studies/cifar10_optimizers.py --workdir=DIR

`b16_pt` starts from Google's ImageNet-1k weights, which are downloaded, or from a
file: --set=b16_pt:pretrained=FILE. Images from a folder:
--set=data.name=folder --set=data.dir=FOLDER.
"""

import pathlib

from mixer_jax import study

_CONFIGS = pathlib.Path(__file__).parent.parent


def config(model, optimizer):
  config = study.read_config(_CONFIGS / f"{optimizer}_cifar10.py", model)
  if model == "b16_pt":
    config.pretrained = "google/imagenet1k/Mixer-B_16"
  return config


def get_study():
  return study.Study(
    title="SGD, Adam and K-FAC on CIFAR-10",
    config=config,
    axes={
      "model": ("s4", "b4", "s16", "b16", "b16_pt"),
      "optimizer": ("sgd", "adam", "kfac"),
    },
    source="Hosseini, Zhou, Chen (2022), Table 2",
    published_at="best",
    published={
      ("s4", "sgd"): study.Published(83.22, 38),
      ("s4", "adam"): study.Published(80.88, 43),
      ("s4", "kfac"): study.Published(82.42, 35),
      ("b4", "sgd"): study.Published(82.73, 40),
      ("b4", "adam"): study.Published(80.9, 42),
      ("b4", "kfac"): study.Published(82.81, 40),
      ("s16", "sgd"): study.Published(74.64, 11),
      ("s16", "adam"): study.Published(71.99, 15),
      ("s16", "kfac"): study.Published(80.44, 3),
      ("b16", "sgd"): study.Published(72.68, 6),
      ("b16", "adam"): study.Published(67.09, 10),
      ("b16", "kfac"): study.Published(79.02, 2),
      ("b16_pt", "sgd"): study.Published(96.73, 0),
      ("b16_pt", "adam"): study.Published(72.24, None),
      ("b16_pt", "kfac"): study.Published(91.00, 40),
    },
    notes=[
      "The paper counts epochs from 0: its 0 is the first epoch, which is 1 here. It prints the best"
      " accuracy of any epoch on the test set and does not give the number of its seeds.",
    ],
  )


def get_config(run):
  return get_study().run_config(run)
