"""Costs of optimizer steps against counts made elsewhere."""

import jax
import numpy as np
import pytest

from benchmarks import flops, optimizers
from mixer_jax import experiment, optim


@pytest.fixture
def tiny_run(tiny_config):
  tiny_config.model.num_blocks = 1
  return experiment.build(tiny_config)


@pytest.mark.thorough
def test_gradient_costs_are_those_that_xla_counts(tiny_config):
  # Wide enough for products to dominate the elementwise work, which XLA counts, too.
  tiny_config.model.update(hidden_dim=256, tokens_mlp_dim=64, channels_mlp_dim=512)
  run = experiment.build(tiny_config)
  problem = run.problem
  blocks = optim.kfac_blocks(problem.predict, problem.params, problem.batch)
  costs = flops.step_costs(blocks, tiny_config.batch_size)

  def loss(params, batch):
    total, _ = run.task.loss({"params": params}, batch, jax.random.key(0))
    return total.total

  shapes = problem.params, run.batch_shapes
  compiled = jax.jit(jax.grad(loss)).lower(*shapes).compile()
  counted = compiled.cost_analysis()["flops"]
  assert 0.9 * counted < costs.gradient < 1.1 * counted


def test_predicted_ratio_by_hand():
  block = optim.curvature_blocks.Block("d", "kronecker", ("d/kernel",), ((3, 5),), (3, 5), tokens=7)
  costs = flops.step_costs([block], batch_size=2)
  assert costs.gradient == 3 * 2 * 14 * 3 * 5
  assert costs.factors == 3 * 2 * 14 * 15 + 2 * 14 * (9 + 25)
  assert costs.preconditioning == 2 * (2 * 3 * 3 * 5 + 2 * 3 * 5 * 5)
  assert costs.inverses == 9 * (27 + 125)
  extra = costs.factors / 10 + costs.inverses / 100 + costs.preconditioning
  assert costs.ratio(10, 100) == 1 + extra / costs.gradient


@pytest.mark.slow
def test_every_optimizer_is_measured(tiny_run):
  names = [*optim.OPTIMIZERS, "kfac_jax.Optimizer"]
  costs = optimizers.measure(tiny_run, rounds=1, names=names)
  kinds = {"kfac": 3, "kfac_adam": 3, "soap": 2, "shampoo": 2}
  assert len(costs) == len(names) + sum(kinds.values())
  assert costs["sgd"].ratio == 1.0
  plain, factors, inverses = (costs[f"kfac {k}"].seconds for k in ("plain", "factors", "inverses"))
  expected = plain + (factors - plain) / 10 + (inverses - factors) / 100
  np.testing.assert_allclose(costs["kfac"].seconds, expected)
  assert costs["kfac"].peak_bytes > costs["adam"].peak_bytes > costs["sgd"].peak_bytes
