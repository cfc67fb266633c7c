"""Costs of optimizer steps against counts made elsewhere."""

import types

import jax
import numpy as np
import pytest

from benchmarks import flops, optimizers
from mixer_jax import config as config_lib
from mixer_jax import experiment, optim
from mixer_jax.errors import UserError
from mixer_jax.optimizers import OPTIMIZERS, curvature_blocks, group


@pytest.mark.thorough
def test_gradient_costs_are_those_that_xla_counts(tiny_config):
  # Wide enough for products to dominate the elementwise work, which XLA counts, too.
  tiny_config.model.update(hidden_dim=256, tokens_mlp_dim=64, channels_mlp_dim=512)
  run = experiment.build(tiny_config)
  problem = run.problem
  blocks = curvature_blocks(group("kfac", 0.1), problem)
  costs = flops.step_costs(blocks, tiny_config.batch_size)

  def loss(params, batch):
    total, _ = run.task.loss({"params": params}, batch, jax.random.key(0))
    return total.total

  shapes = problem.params, run.batch_shapes
  compiled = jax.jit(jax.grad(loss)).lower(*shapes).compile()
  counted = compiled.cost_analysis()["flops"]
  assert 0.9 * counted < costs.gradient < 1.1 * counted


def test_predicted_ratio_by_hand():
  block = optim.Block("d", "kronecker", ("d/kernel",), ((3, 5),), (3, 5), tokens=7)
  costs = flops.step_costs([block], batch_size=2)
  assert costs.gradient == 3 * 2 * 14 * 3 * 5
  assert costs.factors == 3 * 2 * 14 * 15 + 2 * 14 * (9 + 25)
  assert costs.preconditioning == 2 * (2 * 3 * 3 * 5 + 2 * 3 * 5 * 5)
  assert costs.inverses == 9 * (27 + 125)
  extra = costs.factors / 10 + costs.inverses / 100 + costs.preconditioning
  assert costs.ratio(10, 100) == 1 + extra / costs.gradient


@pytest.mark.slow
def test_every_optimizer_is_measured(tiny_run):
  names = [*OPTIMIZERS, "kfac_jax.Optimizer"]
  costs = optimizers.measure(tiny_run, rounds=1, names=names)
  kinds = {"kfac": 3, "kfac_adam": 3, "kfac_muon": 3, "soap": 2, "shampoo": 2}
  assert len(costs) == len(names) + sum(kinds.values())
  assert costs["sgd"].ratio == 1.0
  plain, factors, inverses = (costs[f"kfac {k}"].seconds for k in ("plain", "factors", "inverses"))
  expected = plain + (factors - plain) / 10 + (inverses - factors) / 100
  np.testing.assert_allclose(costs["kfac"].seconds, expected)
  assert costs["kfac"].peak_bytes > costs["adam"].peak_bytes > costs["sgd"].peak_bytes


def test_kinds_of_steps_of_a_graft_are_those_of_the_side_with_factors():
  sgd = config_lib.optimizer("sgd", 0.1)
  kfac = config_lib.optimizer("kfac", 0.1, factor_period=2, inverse_period=6)
  shares = {kind: share for kind, (_, share) in optimizers.kinds(kfac).items()}
  assert shares == {"factors": 2 / 6, "inverses": 1 / 6, "plain": 3 / 6}
  for sides in ((sgd, kfac), (kfac, sgd), (kfac, kfac)):
    assert optimizers.kinds(config_lib.grafted(*sides)) == optimizers.kinds(kfac)
  assert optimizers.kinds(config_lib.grafted(sgd, sgd)) == {"plain": (1, 1.0)}
  always = config_lib.optimizer("kfac", 0.1, factor_period=1, inverse_period=1)
  assert optimizers.kinds(config_lib.grafted(sgd, always)) == optimizers.kinds(always)
  other = config_lib.optimizer("kfac", 0.1, factor_period=3, inverse_period=6)
  with pytest.raises(UserError, match="different periods"):
    optimizers.kinds(config_lib.grafted(kfac, other))


def test_steps_that_adapt_the_damping_are_kinds_of_their_own():
  periods = dict(factor_period=5, inverse_period=5, damping_period=5, factor_damping_period=20)
  chosen = dict(quadratic_model=True, adaptive_damping=True, damping_type="factored")
  found = optimizers.kinds(config_lib.optimizer("kfac", 1.0, **periods, **chosen))
  adapts = {kind: (n + 1) % 5 == 0 for kind, (n, _) in found.items()}
  assert adapts == {kind: kind.endswith("adapted damping") for kind in found}
  assert {kind: share for kind, (_, share) in found.items()} == {
    "inverses": 3 / 20,
    "inverses with a choice of damping": 1 / 20,
    "plain": 12 / 20,
    "plain with adapted damping": 4 / 20,
  }


@pytest.mark.slow
def test_runs_of_a_study_are_compared(capsys):
  chosen = "tune-sgd-0,tune-kfac-0"
  options = dict(study="configs/studies/quickstart.py", run=chosen, set=["model.num_blocks=1"])
  optimizers.of_study(types.SimpleNamespace(**options, rounds=1, kfac_jax=True))
  lines = capsys.readouterr().out.splitlines()[-6:]
  kinds = [f"tune-kfac-0 {kind}" for kind in ("factors", "inverses", "plain")]
  names = [*kinds, "kfac_jax.Optimizer", *chosen.split(",")]
  assert [line.split("  ")[0].strip() for line in lines] == names
  assert "  1.00 x tune-sgd-0 " in lines[4]
  assert all(" x tune-sgd-0 " in line for line in (lines[3], lines[5]))
