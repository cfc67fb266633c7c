"""Darcy flow and its inverse, in the small setting: 85x85 points, attention on 29x29.

  python -m mixer_jax.study --study=configs/studies/darcy.py --workdir=DIR

Galerkin attention and FNO find the pressure; Galerkin attention finds the coefficient again from
the pressure with three shares of noise. All train for 100 epochs of 1cycle on 1,024 functions with
the rates of configs/darcy.py and configs/darcy_inverse.py and are tested on 100. Published (Cao,
NeurIPS 2021) are, on 141x141 points, 8e-3 to 1e-2 for the pressure.
"""

import pathlib

from mixer_jax import study

_HERE = pathlib.Path(__file__).parent
_FORWARD = {"galerkin": "galerkin_2d", "fno": "fno_2d"}
_INVERSE = {"inverse_0": 0.0, "inverse_0.01": 0.01, "inverse_0.1": 0.1}  # shares of noise


def config(problem, optimizer):
  file, model = "darcy", _FORWARD.get(problem, "galerkin_inverse")
  if problem in _INVERSE:
    file = "darcy_inverse"
  config = study.read_config(_HERE.parent / f"{file}.py", f"{model},{optimizer}")
  config.data.noise = _INVERSE.get(problem, 0.0)
  return config


def get_study():
  return study.Study(
    title="Darcy flow and its inverse on 85x85 points",
    config=config,
    axes={"problem": (*_FORWARD, *_INVERSE), "optimizer": ("adam", "kfac_adam")},
    lines=("optimizer",),
    notes=["Relative L2 error over 100 test functions, the mean; lower is better."],
  )


def get_config(run):
  return get_study().run_config(run)
