"""Table 4 of the K-FAC study: grafting SGD and K-FAC on CIFAR-10.

  python -m mixer_jax.study --study=configs/studies/cifar10_grafting.py --workdir=DIR

`sgd_kfac` takes steps of the length of SGD's in the direction of K-FAC's. `b16_pt`
starts from Google's ImageNet-1k weights, which are downloaded, or from a file:
--set=b16_pt:pretrained=FILE.
"""

import pathlib

from mixer_jax import study

_CONFIGS = pathlib.Path(__file__).parent.parent


def config(model, optimizer):
  sides = optimizer.split("_")
  config = study.read_config(_CONFIGS / "graft_cifar10.py", ",".join((model, *sides)))
  if model == "b16_pt":
    config.pretrained = "google/imagenet1k/Mixer-B_16"
  return config


def get_study():
  return study.Study(
    title="Grafting SGD and K-FAC on CIFAR-10",
    config=config,
    axes={
      "model": ("s16", "b16", "b16_pt"),
      "optimizer": ("sgd_sgd", "sgd_kfac", "kfac_sgd", "kfac_kfac"),
    },
    source="Hosseini, Zhou, Chen (2022), Table 4",
    published_at="best",
    published={
      ("s16", "sgd_sgd"): study.Published(74.64),
      ("s16", "sgd_kfac"): study.Published(75.47),
      ("s16", "kfac_sgd"): study.Published(80.45),
      ("s16", "kfac_kfac"): study.Published(80.44),
      ("b16", "sgd_sgd"): study.Published(72.68),
      ("b16", "sgd_kfac"): study.Published(75.44),
      ("b16", "kfac_sgd"): study.Published(78.86),
      ("b16", "kfac_kfac"): study.Published(79.02),
      ("b16_pt", "sgd_sgd"): study.Published(96.73),
      ("b16_pt", "sgd_kfac"): study.Published(95.92),
      ("b16_pt", "kfac_sgd"): study.Published(90.75),
      ("b16_pt", "kfac_kfac"): study.Published(91.00),
    },
    notes=[
      "The paper took its diagonal, an optimizer grafted on itself, from the optimizer's own runs"
      " (Table 2); here it is run. Its text gives SGD the learning rate 1e-2 and K-FAC 1e-3; its"
      " released code has one rate for both sides.",
    ],
  )


def get_config(run):
  return get_study().run_config(run)
