"""Angles between updates, and their lengths, against numbers by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import updates
from mixer_jax import config as config_lib
from mixer_jax import experiment


class Kinds:
  class task:
    layer_kind = staticmethod(lambda path: "head" if path.startswith("head") else "stem")


def test_cosines_and_shares_by_hand():
  trees = [
    {"head": {"bias": jnp.array([3.0, 0.0])}, "stem": {"kernel": jnp.array([[4.0]])}},
    {"head": {"bias": jnp.array([0.0, 2.0])}, "stem": {"kernel": jnp.array([[0.0]])}},
    {"head": {"bias": jnp.array([-6.0, 0.0])}, "stem": {"kernel": jnp.array([[-8.0]])}},
  ]
  found = updates._measured(Kinds, trees)
  np.testing.assert_allclose(found.cosines, [[1, 0, -1], [0, 1, 0], [-1, 0, 1]], atol=1e-6)
  np.testing.assert_allclose(found.shares["head"], [0.36, 1.0, 0.36], rtol=1e-6)
  np.testing.assert_allclose(found.shares["stem"], [0.64, 0.0, 0.64], atol=1e-6)
  np.testing.assert_allclose(found.lengths, [5e3, 2e3, 1e4], rtol=1e-6)  # of a rate of 1e-3


def test_a_figure_has_a_row_for_each_optimizer():
  number = len(updates.OPTIMIZERS)
  shares = {"stem": np.full(number, 0.5), "head": np.ones(number)}
  matrix, bars, lengths = updates.draw(
    updates.Compared(np.eye(number), shares, shares["head"])
  ).axes
  assert len(matrix.texts) == number**2 and len(bars.patches) == 2 * number
  assert len(lengths.patches) == number


@pytest.mark.thorough
def test_the_run_trains_by_its_own_step(tiny_config, monkeypatch):
  """Also with a rule that asks for the loss, and with rates by layer, which change what others see."""
  some = {name: updates.OPTIMIZERS[name] for name in ("SGD", "Adam")}
  monkeypatch.setattr(updates, "OPTIMIZERS", some)
  found = []
  for tiny_config.layer_decay in (1.0, 0.5):
    found.append(updates.compare(experiment.build(tiny_config), 3))
  assert (found[0].lengths != found[1].lengths).all()
  tiny_config.layer_decay = 1.0
  tiny_config.optimizer = config_lib.optimizer("kfac", 0.1, adaptive_damping=True)
  assert np.isfinite(updates.compare(experiment.build(tiny_config), 2).cosines).all()


@pytest.mark.slow
def test_all_see_one_run(tiny_config):
  found = updates.compare(experiment.build(tiny_config), 3)
  number = len(updates.OPTIMIZERS)
  np.testing.assert_allclose(np.diag(found.cosines), np.ones(number), rtol=1e-5)
  np.testing.assert_allclose(found.cosines, found.cosines.T, rtol=1e-5)
  np.testing.assert_allclose(sum(found.shares.values()), np.ones(number), rtol=1e-5)
  assert jax.tree.all(jax.tree.map(lambda x: bool(np.isfinite(x).all()), found))
