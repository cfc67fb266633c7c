"""First- and second-order optimizers at equal time, twelve tries each, on CIFAR-10 and CIFAR-100.

  python -m mixer_jax.study --study=configs/studies/frontier.py --workdir=DIR \
      --set=cifar10:data.dir=FOLDER --set=cifar100:data.dir=FOLDER --max_minutes=60

Each FOLDER (by default cifar10 and cifar100) holds {train,test}/CLASS/IMAGE.{jpg,png}. Twelve
settings of each optimizer are drawn from quasi-random sequences and tried on nine tenths of the
training set in the shortest budget; the best on the last tenth is trained on the whole set in
every budget, with three seeds, and tested once. A budget is a time: of each optimizer as many
steps as fit, by the relative cost of its step, and the schedule is stretched over them.
"""

import pathlib

from mixer_jax import config as config_lib
from mixer_jax import study

_HERE = pathlib.Path(__file__).parent
_STEPS = 2400  # of AdamW in the budget 1x: three epochs of batches of 64
_BUDGETS = {"1x": 1, "2x": 2, "4x": 4}
# Seconds of a step over those of an SGD step, this Mixer at batch 64 with the settings below, on one
# core of an AMD EPYC; that of kfac_muon is 0.886 of Muon's, their ratio on mini16 and an Intel Xeon.
# On another device measure them again, in turns:
#   python -m benchmarks costs --study=configs/studies/frontier.py --run='1x-cifar10-mini8-*-seed0'
_COST = {
  "sgd": 1.0,
  "adamw": 1.02,
  "lamb": 1.08,
  "muon": 1.64,
  "shampoo": 1.14,
  "adam_shampoo": 1.28,
  "soap": 1.14,
  "kfac": 1.55,
  "ekfac": 1.58,
  "kfac_adam": 1.1,
  "kfac_muon": 1.45,
  "sgd_kfac": 1.65,
}
# The side of the 512 hidden channels has no basis: at equal time that is better for Adam in K-FAC's
# basis and SOAP by two points, and no better for K-FAC. The side of the patches' pixels, one layer
# with 768 in mini16, always has: nearly six points there (results/equal_time.csv).
_ONE_SIDED = dict(max_factor=257, full_factors="^stem/", basis_period=50)
_SETTINGS = {
  "kfac": dict(factor_decay=0.8, factor_period=10, inverse_period=50),
  "kfac_adam": dict(b2=0.99, factor_fraction=0.25, **_ONE_SIDED),
  "kfac_muon": dict(factor_fraction=0.25, **_ONE_SIDED),
  "shampoo": dict(corrected=True, factor_period=5, **_ONE_SIDED),
  "soap": dict(factor_period=5, **_ONE_SIDED),
}
# Lowest and highest values; logarithms are drawn uniformly.
_ADAM_RATES, _DECOUPLED, _L2 = (1e-3, 3e-2), (1e-3, 1.0), (1e-5, 1e-2)
_SGD = {"learning_rate": (1e-2, 1.0), "weight_decay": _L2}
_KFAC = {"learning_rate": (2e-3, 0.2), "weight_decay": _L2, "damping": (1e-3, 1e-1)}
_IN_BASIS = {"learning_rate": _ADAM_RATES, "weight_decay": _DECOUPLED}
_SEARCH = {
  "sgd": _SGD,
  "adamw": {"learning_rate": (3e-4, 3e-2), "weight_decay": _DECOUPLED},
  "lamb": {"learning_rate": (1e-3, 1e-1), "weight_decay": _DECOUPLED},
  "muon": _IN_BASIS,
  "shampoo": _IN_BASIS,
  "adam_shampoo": {"magnitude.learning_rate": _ADAM_RATES, "direction.weight_decay": _DECOUPLED},
  "soap": _IN_BASIS,
  "kfac": _KFAC,
  "ekfac": _KFAC,
  "kfac_adam": _IN_BASIS,
  "kfac_muon": _IN_BASIS,
  "sgd_kfac": {f"magnitude.{k}": v for k, v in _SGD.items()} | {"direction.damping": (1e-3, 1e-1)},
}
_TRIALS = 12


def _optimizer(name):
  """One of the ten, or a pair: "sgd_kfac", or "adam_shampoo", whose Shampoo is not corrected."""
  if name == "sgd_kfac":
    return config_lib.grafted(_optimizer("sgd"), _optimizer("kfac"))
  if name == "adam_shampoo":
    settings = _SETTINGS["shampoo"] | dict(corrected=False)
    direction = config_lib.optimizer("shampoo", 1e-3, **settings)
    return config_lib.grafted(_optimizer("adam"), direction)
  if name == "ekfac":
    return config_lib.optimizer("kfac", 0.02, eigenvalues="batch", **_SETTINGS["kfac"])
  return config_lib.optimizer(name, 1e-3, **_SETTINGS.get(name, {}))


def config(budget, data, model, optimizer):
  config = study.read_config(_HERE / "small.py", f"{model}-sgd-seed0")
  config.optimizer = _optimizer(optimizer)
  config.num_steps = round(_STEPS * _BUDGETS[budget] * _COST["adamw"] / _COST[optimizer])
  config.eval_steps = config.checkpoint_steps = config.num_steps // 12
  config.schedule.update(name="cosine", warmup_epochs=0.0, warmup_steps=config.num_steps // 20)
  config.data.update(dir=data, train_split="train")
  config.target = 0.0
  return config


def get_study():
  return study.Study(
    title="The frontier: accuracy at equal time, twelve tries each",
    config=config,
    axes={
      "budget": tuple(_BUDGETS),
      "data": ("cifar10", "cifar100"),
      "model": ("mini8", "mini16"),
      "optimizer": tuple(_SEARCH),
    },
    tuning=study.Tuning(study.halton(_SEARCH, _TRIALS), shared=("budget",)),
    target_of="adamw",
    notes=[
      "Each optimizer had twelve tries from a Halton sequence, in the shortest budget. Steps of an"
      " optimizer are as many as take the time of AdamW's by their relative cost. The target is the"
      " mean accuracy with which tuned AdamW ends in the same budget.",
    ],
  )


def get_config(run):
  return get_study().run_config(run)
