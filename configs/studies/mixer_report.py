"""S/32, S/16, B/32 and B/16 at 224x224 for 20 epochs of CIFAR-10.

python -m mixer_jax.study --study=configs/studies/mixer_report.py --workdir=DIR
"""

from mixer_jax import config as config_lib
from mixer_jax import study


def config(model, optimizer):
  config = config_lib.default()
  config.num_epochs = 20
  config.model = config_lib.model(f"mixer_{model}")
  config.data = config_lib.data("cifar10", like="cifar10")
  config.data.update(resize=256, image_size=224, pad=0)
  config.optimizer = config_lib.optimizer(optimizer, learning_rate=1e-3, weight_decay=1e-4)
  config.schedule.update(name="cosine", warmup_epochs=1.0)
  return config


def get_study():
  return study.Study(
    title="Mixers of two sizes and two patches, 20 epochs of CIFAR-10",
    config=config,
    axes={"model": ("s32", "s16", "b32", "b16"), "optimizer": ("adam",)},
    source="a report on MLP-Mixer; no other value of it is known",
    published={("b32", "adam"): study.Published(69.24)},
    notes=[
      "The report is known by its models, its image size, its 20 epochs and the accuracy of B/32"
      " alone. The data set and all settings of the optimizer are ours.",
    ],
  )


def get_config(run):
  return get_study().run_config(run)
