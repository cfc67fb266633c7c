"""Equations solved by ten optimizers at equal time, three tries each, chosen by the training loss.

  python -m mixer_jax.study --study=configs/studies/physics.py --workdir=DIR --parallel=N \
      [--run='20s-*,tune-20s-*']

A budget is a time of training steps on one core, without compilation and evaluation. Optimizers with a
schedule get as many steps as fit, by the steps of a second below; the others stop by the clock. The
settings of a budget are those of the shortest. Points are fixed, all is float64.
"""

import pathlib

from mixer_jax import study

_CONFIG = pathlib.Path(__file__).parent.parent / "physics.py"
_BUDGETS = {"20s": 20, "60s": 60, "300s": 300}
# Problem and net, and the steps of a second of Adam on one core of an Intel Xeon. On another device measure
# them again. In five dimensions points are fixed here, too.
_PROBLEMS = {
  "poisson_2d": ("poisson_2d,small", 1500),
  "poisson_2d_deep": ("poisson_2d,deep", 92),
  "heat_1d": ("heat_1d,small", 1450),
  "poisson_5d": ("poisson_5d,deep", 6),
  "burgers": ("burgers,even", 27),
  "korteweg_de_vries": ("korteweg_de_vries,even", 9),
}
# Steps over Adam's in equal time, on the small nets; of those that stop by the clock they only say how
# often they are evaluated.
_STEPS = {
  "adam": 1.0,
  "soap": 0.95,
  "muon": 1.0,
  "kfac_adam": 0.6,
  "lbfgs": 0.5,
  "ssbroyden": 0.4,
  "kfac": 0.15,
  "hessian_free": 0.02,
  "gauss_newton": 0.013,
  "spring": 0.013,
}
_SCHEDULED = ("adam", "soap", "muon", "kfac_adam")
_EVALUATIONS = 20
_RATES = [{"learning_rate": rate} for rate in (1e-3, 3e-3, 1e-2)]
_DAMPINGS = [{"damping": damping} for damping in (1e-4, 1e-2, 1.0)]
_TRIES = {
  "adam": _RATES,
  "soap": _RATES,
  "muon": _RATES,
  "kfac_adam": _RATES,
  "lbfgs": [{"memory_size": size} for size in (10, 30, 100)],
  "ssbroyden": [{"method": method} for method in ("ssbroyden", "ssbfgs", "bfgs")],
  "kfac": _DAMPINGS,
  "hessian_free": [{"max_iterations": number} for number in (10, 25, 50)],
  "gauss_newton": _DAMPINGS,
  "spring": [{"momentum": momentum} for momentum in (0.3, 0.5, 0.8)],
}


def config(budget, problem, optimizer):
  name, rate = _PROBLEMS[problem]
  own = "gauss_newton" if optimizer == "spring" else optimizer
  config = study.read_config(_CONFIG, f"{name},{own}")
  if optimizer == "gauss_newton":
    config.optimizer.momentum = 0.0
  seconds = _BUDGETS[budget]
  steps = seconds * rate * _STEPS[optimizer]
  config.sets, config.test_points = 1, 3000
  config.eval_steps = max(1, round(steps / _EVALUATIONS))
  if optimizer in _SCHEDULED:
    config.num_steps = _EVALUATIONS * config.eval_steps
    config.schedule.name = "cosine"
  else:
    config.num_steps, config.max_seconds = 10**7, float(seconds)
  config.checkpoint_steps, config.save_best = config.num_steps, False
  return config


def get_study():
  return study.Study(
    title="Equations at equal time, three tries each",
    config=config,
    axes={"budget": tuple(_BUDGETS), "problem": tuple(_PROBLEMS), "optimizer": tuple(_TRIES)},
    tuning=study.Tuning(
      {
        name: [{f"optimizer.{k}": v for k, v in one.items()} for one in tries]
        for name, tries in _TRIES.items()
      },
      hold_out={},
      shared=("budget",),
      metric="train/loss",
    ),
    notes=[
      "Each optimizer had three tries in the shortest budget; the one with the least training loss was run"
      " with three seeds, and its error was looked at then."
    ],
  )


def get_config(run):
  return get_study().run_config(run)
