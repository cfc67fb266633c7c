"""An optimizer in another layout, against itself in its own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mixer_jax import config as config_lib
from mixer_jax import optim

# Two layers in one array, which the optimizer sees apart.
LAYOUT = optim.Layout(
  lambda tree: {"a": tree["both"][0], "b": tree["both"][1]},
  lambda tree: {"both": jnp.stack([tree["a"], tree["b"]])},
)


def test_tensors_are_those_of_the_inner_layout():
  """LAMB steps as far as each tensor is long: by hand, on its first step, with signs alone."""
  params = {"both": jnp.array([[3.0, 4.0], [6.0, 8.0]])}
  grads = {"both": jnp.array([[1.0, -1.0], [2.0, 2.0]])}
  tx = optim.relayout(optax.lamb(0.1, eps=0.0, eps_root=0.0), LAYOUT)
  updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
  # Norms 5 and 10; a first step of Adam is the sign, of norm sqrt(2).
  expected = -0.1 * np.array([[5.0, -5.0], [10.0, 10.0]]) / np.sqrt(2)
  np.testing.assert_allclose(updates["both"], expected, rtol=1e-5)


def test_extra_arguments_and_missing_parameters_pass_through():
  def update(updates, state, params=None, *, factor, model_params):
    assert params is None and model_params is None and set(updates) == {"a", "b"}
    return jax.tree.map(lambda g: factor * g, updates), state + 1

  tx = optim.relayout(optax.GradientTransformationExtraArgs(lambda p: len(p), update), LAYOUT)
  grads = {"both": jnp.ones((2, 3))}
  updates, state = tx.update(grads, tx.init(grads), factor=2.0)
  np.testing.assert_array_equal(updates["both"], 2.0)
  assert state == 3


@pytest.mark.parametrize("name", ["sgd", "lamb", "graft"])
def test_optimizers_that_go_by_tensor_are_built_in_the_inner_layout(name):
  sides = [config_lib.optimizer(side, learning_rate=0.1) for side in ("sgd", "adam")]
  config = config_lib.grafted(*sides) if name == "graft" else config_lib.optimizer(name, 0.1)
  problem = optim.Problem(None, None, None, "categorical", LAYOUT)
  state = optim.build(config, lambda count: 1.0, problem).init({"both": jnp.ones((2, 3))})
  keys = {path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(state) if path[-1:]
          and hasattr(path[-1], "key")}  # fmt: skip
  assert keys == ({"both"} if name == "sgd" else {"a", "b"})
