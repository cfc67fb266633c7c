"""Deep autoencoders: a training loss over seconds, equally tuned.

  python -m mixer_jax.study --study=configs/studies/autoencoder.py --workdir=DIR --run='*sample-*'
  python -m mixer_jax.report compare --log --runs='DIR/sample-*-seed*'

`sample` is the small one of the bundled images; `cifar10` and `mnist` have the widths of Hinton and
Salakhutdinov's. Files of one's own take `--set=mnist:data.name=npz --set=mnist:data.dir=FILE`. On
one core of an AMD EPYC a run takes about ten seconds on the sample and 70 to 100 on the others. Each
optimizer has eight tries from a Halton sequence with batches of 100 and eight with batches of 500;
for each batch the one with the lowest loss of the whole training set after its last epoch is run
with three seeds.
"""

import pathlib

from mixer_jax import study

_CONFIG = pathlib.Path(__file__).parent.parent / "autoencoder.py"
_TRIALS = 8
_BATCHES = {"b100": 100, "b500": 500}
# Epochs by batch, for equal times on one core.
_SMALL = {
  "b100": {"sgd": 200, "adam": 170, "kfac": 52, "kfac_adam": 54},
  "b500": {"sgd": 300, "adam": 300, "kfac": 130, "kfac_adam": 140},
}
_WIDE = {
  "b100": {"sgd": 6, "adam": 5, "kfac": 1, "kfac_adam": 2},
  "b500": {"sgd": 8, "adam": 8, "kfac": 3, "kfac_adam": 5},
}
_EPOCHS = {"sample": _SMALL, "cifar10": _WIDE, "mnist": _WIDE}
_EVALUATIONS = {"sample": 100, "cifar10": 20, "mnist": 20}  # of equal numbers of steps
# Lowest and highest values; logarithms are drawn uniformly.
_SEARCH = {
  "sgd": {"learning_rate": (1e-4, 5e-2), "momentum": (0.9, 0.99)},
  "adam": {"learning_rate": (2e-4, 2e-2)},
  "kfac": {
    "learning_rate": (2e-3, 0.2),
    "damping": (1e-3, 0.1),
    "norm_constraint": (1e-3, 0.1),
  },
  "kfac_adam": {"learning_rate": (3e-4, 3e-2), "b2": (0.9, 0.99)},
}


def config(data, batch, optimizer):
  config = study.read_config(_CONFIG, f"{data},{optimizer}")
  config.batch_size = _BATCHES[batch]
  if optimizer in ("kfac", "kfac_adam"):  # nearly equal numbers of images
    config.optimizer.factor_fraction = {"b100": None, "b500": 0.25}[batch]
  config.schedule.warmup_epochs = config.batch_size / 1000  # as many steps with each
  config.num_epochs = config.checkpoint_epochs = _EPOCHS[data][batch][optimizer]
  config.eval_epochs = config.num_epochs / _EVALUATIONS[data]
  config.save_best = False  # a hundred times, it would take as long as the steps of K-FAC
  return config


def get_study():
  return study.Study(
    title="Deep autoencoders: equal times, equal tuning",
    config=config,
    axes={"data": tuple(_EPOCHS), "batch": tuple(_BATCHES), "optimizer": tuple(_SEARCH)},
    lines=("batch", "optimizer"),
    # Optimizers are compared as such: by the loss of the set that they minimise it on.
    tuning=study.Tuning(
      study.halton(_SEARCH, _TRIALS), hold_out={"data.test_split": "train", "eval_epochs": 300.0}
    ),
    notes=[
      "Cosine. The loss is the sum of squares of an image, on MNIST the"
      " cross-entropy of its pixels. Runs know epochs, not seconds: their numbers were chosen for"
      " equal times.",
    ],
  )


def get_config(run):
  return get_study().run_config(run)
