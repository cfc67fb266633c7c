"""Table 3 of the K-FAC study: SGD, Adam and K-FAC on CIFAR-100.

  python -m mixer_jax.study --study=configs/studies/cifar100_optimizers.py --workdir=DIR

`b16_pt` starts from Google's ImageNet-1k weights, which are downloaded, or from a
file: --set=b16_pt:pretrained=FILE. Images from a folder:
--set=data.name=folder --set=data.dir=FOLDER.
"""

import pathlib

from mixer_jax import study

_CONFIGS = pathlib.Path(__file__).parent.parent


def config(model, optimizer):
  config = study.read_config(_CONFIGS / f"{optimizer}_cifar100.py", model)
  if model == "b16_pt":
    config.pretrained = "google/imagenet1k/Mixer-B_16"
  return config


def get_study():
  return study.Study(
    title="SGD, Adam and K-FAC on CIFAR-100",
    config=config,
    axes={"model": ("b4", "b16", "b16_pt"), "optimizer": ("sgd", "adam", "kfac")},
    source="Hosseini, Zhou, Chen (2022), Table 3",
    published_at="best",
    published={
      ("b4", "sgd"): study.Published(53.67, 10),
      ("b4", "adam"): study.Published(48.04, 11),
      ("b4", "kfac"): study.Published(60.59, 3),
      ("b16", "sgd"): study.Published(47.65, 6),
      ("b16", "adam"): study.Published(42.71, 7),
      ("b16", "kfac"): study.Published(54.96, 3),
      ("b16_pt", "sgd"): study.Published(83.49, 0),
      ("b16_pt", "adam"): study.Published(45.37, None),
      ("b16_pt", "kfac"): study.Published(70.81, 41),
    },
    notes=[
      "The paper counts epochs from 0: its 0 is the first epoch, which is 1 here. It prints the best"
      " accuracy of any epoch on the test set and does not give the number of its seeds.",
    ],
  )


def get_config(run):
  return get_study().run_config(run)
