"""Equations solved by a net.

  python -m mixer_jax.main --config=configs/physics.py[:PROBLEM[,NET[,OPTIMIZER]]]

PROBLEM is one of `PROBLEMS`. NET is small, deep or wide, the hidden layers of arXiv:2405.15603 (64;
64-64-48-48; 256-256-128-128), or huge, those of its 100 dimensions; without it, the problem's own. All
is float64. OPTIMIZER is gauss_newton, the default, hessian_free, which has no limit of points, kfac, which steps
to the minimum of the quadratic model and adapts the damping, ssbroyden, lbfgs, adam_lbfgs (one after
the other), soap, muon, kfac_adam or adam. Points are fixed, but above four dimensions, where each step has others.
"""

from mixer_jax import config as config_lib
from mixer_jax.errors import UserError

NETS = {
  "small": (64,),
  "deep": (64, 64, 48, 48),
  "wide": (256, 256, 128, 128),
  "huge": (768, 768, 512, 512),
  "even": (50, 50, 50, 50),
}
_PERIODIC = dict(net="even", harmonics=5, start="glorot", num_steps=5000)
_RENEWED = dict(sets=200, test_points=3000)
PROBLEMS = {
  "poisson_2d": dict(net="small"),
  "poisson_5d": dict(net="deep", **_RENEWED),
  "poisson_10d": dict(net="wide", **_RENEWED),
  "poisson_100d": dict(net="huge", sets=1000, test_points=500),
  "heat_1d": dict(net="small"),
  "heat_4d": dict(net="wide", **_RENEWED),
  "log_fokker_planck_9d": dict(net="wide", **_RENEWED),
  "burgers": dict(net="even", start="glorot", num_steps=5000),
  "allen_cahn": _PERIODIC,
  "korteweg_de_vries": _PERIODIC,
  "kuramoto_sivashinsky": _PERIODIC,
  "burgers_inverse": dict(net="even", start="glorot", num_steps=5000),
  "cavity": dict(net="even", start="glorot", num_steps=5000),
}
OPTIMIZERS = {
  "gauss_newton": dict(momentum=0.5, acceleration=True),
  "hessian_free": dict(acceleration=True, estimation="exact"),
  "kfac": dict(
    learning_rate=1.0,
    quadratic_model=True,
    adaptive_damping=True,
    damping=1e-3,
    min_damping=1e-16,
    max_increase=4.0,
    estimation="exact",
    weight_decay=0.0,
    factor_period=1,
    inverse_period=1,
    factor_decay=0.7,
  ),
  "ssbroyden": {},
  "lbfgs": {},
  "adam_lbfgs": {},
  "soap": dict(learning_rate=3e-3, weight_decay=0.0),
  "muon": dict(learning_rate=3e-3, weight_decay=0.0),
  "kfac_adam": dict(learning_rate=3e-3, weight_decay=0.0, estimation="exact"),
  "adam": dict(learning_rate=1e-3),
}


def optimizer_of(name):
  if name == "adam_lbfgs":
    return config_lib.in_turn(optimizer_of("adam"), optimizer_of("lbfgs"), steps=2000)
  return config_lib.optimizer(name, **OPTIMIZERS[name])


def get_config(choice="poisson_2d"):
  problem, *rest = choice.split(",")
  net, optimizer = (*rest, *("", "")[len(rest) :])[:2]
  settings = dict(PROBLEMS.get(problem, {}))
  own = settings.pop("net", "small")
  optimizer = optimizer or "gauss_newton"
  if problem not in PROBLEMS or (net and net not in NETS) or optimizer not in OPTIMIZERS:
    allowed = f"PROBLEM of {', '.join(PROBLEMS)}, NET of {', '.join(NETS)}"
    raise UserError(
      f"the config takes {choice!r}; allowed: {allowed}, OPTIMIZER of {', '.join(OPTIMIZERS)}"
    )
  config = config_lib.default("physics", "mlp")
  config.problem.name = problem
  config.float64 = True
  config.batch_size = 1  # sets of points
  config.eval_batch_size = 2000
  config.num_steps, config.eval_steps, config.checkpoint_steps = 2000, 100, 500
  config.model.hidden_dims = NETS[net or own]
  for field, value in settings.items():
    group = config.model if field in config.model else config
    group[field] = value
  config.optimizer = optimizer_of(optimizer)
  return config
