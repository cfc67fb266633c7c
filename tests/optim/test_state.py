"""Each optimizer compiles once, and goes on from a saved state to the bit."""

import functools

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from mixer_jax import optim
from tests.optim.two_layers import predict, sequence

PARAMS, BATCH, _ = sequence()[0]
KFAC = functools.partial(optim.kfac, 1e-2, predict, PARAMS, BATCH, factor_period=2)
IN_BASIS = dict(factor_period=2, basis_period=4)
MAKES = {
  "kfac_muon_one_side": functools.partial(
    optim.kfac_muon, 1e-2, predict, PARAMS, BATCH, max_factor=4, **IN_BASIS
  ),
  "soap": functools.partial(optim.soap, 1e-2, basis_period=4),
  "ekfac_batch": functools.partial(KFAC, inverse_period=4, eigenvalues="batch"),
  "ekfac_examples": functools.partial(KFAC, inverse_period=4, eigenvalues="examples"),
  "kfac_qr": functools.partial(KFAC, inverse_period=4, refresh="qr", tolerance=0.1),
  "kfac_factored": functools.partial(KFAC, inverse_period=4, damping_type="factored"),
  "kfac_one_side": functools.partial(KFAC, inverse_period=4, max_factor=4),
  "kfac_adam": functools.partial(optim.kfac_adam, 1e-2, predict, PARAMS, BATCH, **IN_BASIS),
  "kfac_adam_one_side": functools.partial(
    optim.kfac_adam, 1e-2, predict, PARAMS, BATCH, max_factor=4, **IN_BASIS
  ),
  "kfac_adam_qr": functools.partial(
    *(optim.kfac_adam, 1e-2, predict, PARAMS, BATCH), refresh="qr", tolerance=0.1, **IN_BASIS
  ),
  "kfac_muon": functools.partial(optim.kfac_muon, 1e-2, predict, PARAMS, BATCH, **IN_BASIS),
  "corrected_shampoo": functools.partial(
    optim.shampoo, 1e-2, basis_period=4, corrected=True, max_factor=4
  ),
  "shampoo": functools.partial(optim.shampoo, 1e-2, basis_period=4),
  "muon": functools.partial(optim.OPTIMIZERS["muon"], 1e-2),
  "grafted_shampoo": lambda: optim.graft(optim.adam(1e-2), optim.shampoo(1e-2, basis_period=4)),
}


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.first(4)
def test_a_saved_state_goes_on_to_the_bit(name, tmp_path):
  tx = optax.with_extra_args_support(MAKES[name]())
  traced = []

  @jax.jit
  def step(grads, state, params, batch, t):
    traced.append(t)
    return tx.update(grads, state, params, batch=batch, rng=jax.random.key(t))

  state, whole, saved = tx.init(PARAMS), [], None
  for t, (params, batch, grads) in enumerate(sequence()[:10]):
    if t == 5:  # between two renewals
      with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        saved = checkpointer.restore(tmp_path / "state", jax.eval_shape(tx.init, PARAMS))
    update, state = step(grads, state, params, batch, t)
    whole.append(update)
  assert len(traced) == 1  # the types of a state are those of its updates
  for t, (params, batch, grads) in list(enumerate(sequence()[:10]))[5:]:
    update, saved = step(grads, saved, params, batch, t)
    jax.tree.map(np.testing.assert_array_equal, update, whole[t])
  assert any(np.any(x) for x in jax.tree.leaves(whole[5]))
