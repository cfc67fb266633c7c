"""An equation of your own, Helmholtz' in a square, in twenty lines.

python -m mixer_jax.main --config=docs/own_equation.py --workdir=runs/helmholtz
python -m mixer_jax.report pictures --workdir=runs/helmholtz
"""

from typing import Annotated

import jax.numpy as jnp

from mixer_jax import config as config_lib
from mixer_jax.options import Option
from mixer_jax.tasks import physics


def helmholtz(k: Annotated[float, Option("wave number", 0.1, 100)] = 4.0):
  box = physics.Box((-1.0, -1.0), (1.0, 1.0), ("x", "y"))
  exact = lambda x: jnp.sin(jnp.pi * x[0]) * jnp.sin(k * x[1])
  source = lambda x: -(jnp.pi**2) * exact(x)  # Laplace u + k^2 u
  terms = {
    "interior": physics.Term(
      lambda u, x: physics.laplacian(u, x) + k**2 * u(x) - source(x), box.inside, 1000
    ),
    "boundary": physics.Term(lambda u, x: u(x) - exact(x), box.faces(), 200, weight=10.0),
  }
  return physics.Problem(box, terms, exact=exact)


Helmholtz = physics.task(helmholtz)


def get_config():
  config = config_lib.default("docs.own_equation:Helmholtz", "mlp")
  config.float64, config.batch_size, config.eval_batch_size = True, 1, 2000
  config.num_steps, config.eval_steps, config.checkpoint_steps = 200, 20, 100
  config.model.hidden_dims = (32, 32)
  config.optimizer = config_lib.optimizer("gauss_newton", momentum=0.5, acceleration=True)
  return config
