"""NorMuon and the normalisation of output directions in K-FAC's metric, at equal time.

  python -m mixer_jax.study --study=configs/studies/normuon.py --workdir=DIR \
      --set=cifar10:data.dir=FOLDER --set=cifar100:data.dir=FOLDER --run='*1x-64-*' --max_minutes=60

The cells are those of `frontier.py`, as are the folders and the settings of the bases. 1x is the time
of 1,493 steps of Muon with batches of 64, as there. Four pairs of rate and decay are tried on nine
tenths of the training set; the best on the last tenth is trained on the whole set with three seeds,
and tested once.
"""

import pathlib

from mixer_jax import study

_HERE = pathlib.Path(__file__).parent
_STEPS = 1493  # of Muon in the budget 1x
_BUDGETS = {"1x": 1, "4x": 4}
_BASES = {"normuon": "muon", "kfac_normuon": "kfac_muon"}
# Seconds of a step over those of a step of Muon with batches of 64. Measured in turns on one core of a
# quiet AMD EPYC they are 1.05, 0.79, 0.80, 0.83 and 0.86 (results/normuon.csv). NorMuon gets Muon's
# steps, and Muon in K-FAC's metric those of `frontier.py`, where it costs 0.884 of Muon. Measure again:
#   python -m benchmarks costs --study=configs/studies/normuon.py --run='1x-64-cifar100-mini8-*-seed0'
_COST = {
  "muon": 1.0,
  "normuon": 1.0,
  "soap": 0.79,
  "kfac_adam": 0.8,
  "kfac_muon": 0.884,
  "kfac_normuon": 0.92,
}
# How much longer a step with a batch of 128 takes, on another AMD EPYC (results/costs.csv); others 1.92.
_TWICE = {"muon": 1.58, "normuon": 1.58, "kfac_muon": 1.72, "kfac_normuon": 1.72}
_PAIRS = ((0.0077, 0.15), (0.012, 0.031), (0.0077, 0.4), (0.018, 0.0031))


def config(budget, batch, data, model, optimizer):
  base = _BASES.get(optimizer, optimizer)
  config = study.read_config(_HERE / "frontier.py", f"1x-{data}-{model}-{base}-seed0")
  if base in ("muon", "kfac_muon"):
    config.optimizer.normuon = optimizer in _BASES
  cost = _COST[optimizer] * (_TWICE.get(optimizer, 1.92) if batch == "128" else 1.0)
  config.batch_size = int(batch)
  config.num_steps = round(_STEPS * _BUDGETS[budget] / cost)
  config.eval_steps = config.checkpoint_steps = config.num_steps // 2
  config.schedule.warmup_steps = config.num_steps // 20
  return config


def get_study():
  tries = [
    {"optimizer.learning_rate": rate, "optimizer.weight_decay": decay} for rate, decay in _PAIRS
  ]
  return study.Study(
    title="NorMuon in K-FAC's metric: accuracy at equal time, four tries each",
    config=config,
    axes={
      "budget": tuple(_BUDGETS),
      "batch": ("64", "128"),
      "data": ("cifar10", "cifar100"),
      "model": ("mini8", "mini16"),
      "optimizer": tuple(_COST),
    },
    tuning=study.Tuning(dict.fromkeys(_COST, tries)),
    notes=[
      "Each optimizer had the same four pairs of rate and decay in every cell. Steps of an optimizer"
      " are as many as take the time of Muon's with batches of 64 by their relative cost.",
    ],
  )


def get_config(run):
  return get_study().run_config(run)
