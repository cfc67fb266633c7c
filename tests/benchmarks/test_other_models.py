"""The command `other_models`, on the models of packages that the tests install."""

import importlib.util

import pytest

from benchmarks import other_models

CASES = [
  make
  for package, makers in other_models.CASES.items()
  if package in ("flax", "haiku") and importlib.util.find_spec(package)
  for make in makers
]


@pytest.mark.thorough
@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_rows_give_the_gradients_of_layers_and_ten_steps_lower_the_loss(make):
  found = other_models.measure(make())
  assert any(block.kind == "kronecker" for block in found.curvature.blocks)
  assert found.error < 1e-5
  assert found.losses[-1] < found.losses[0] - 0.05
