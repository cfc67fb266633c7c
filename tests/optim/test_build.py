"""From a config to an optimizer: every option arrives, unknown ones are refused."""

import pytest

from mixer_jax import config as config_lib
from mixer_jax import optim
from mixer_jax.errors import UserError


@pytest.mark.parametrize("name", [n for n in optim.NAMES if n != "graft"])
def test_every_option_of_a_config_arrives(name, monkeypatch):
  real = optim._OPTIMIZERS[name]
  arrived = {}

  def spy(learning_rate, *args, **options):
    arrived.update(options, rate=learning_rate(0))
    return config_lib.optim.first_order.sgd(learning_rate)

  known = optim._options(name)
  values = {k: p.default if isinstance(p.default, (bool, str)) else 0.123 for k, p in known.items()}
  values |= {k: 7 for k in known if k.endswith("period") or k == "decay_from"}
  config = config_lib.optimizer(name, learning_rate=0.5, decay="all", **values)
  monkeypatch.setitem(optim._OPTIMIZERS, name, spy)
  monkeypatch.setattr(optim, "_options", lambda _: known)
  optim.build(config, lambda count: 0.1, problem=None)
  assert arrived == values | {"decay_mask": None, "rate": 0.05}
  assert real is not spy


def test_unknown_options_and_sides_are_named():
  config = config_lib.optimizer("adam", learning_rate=0.1, damping=1.0)
  with pytest.raises(UserError, match="optimizer.damping is no option of adam"):
    optim.build(config, lambda count: 1.0, None)
  config = config_lib.grafted(config, config)
  del config.direction
  with pytest.raises(UserError, match="optimizer.direction is missing"):
    optim.build(config, lambda count: 1.0, None)
