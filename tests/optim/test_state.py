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
CURVATURE, CUT = (optim.Curvature(predict, PARAMS, BATCH, max_factor=n) for n in (None, 4))
PERIODS = dict(factor_period=2, inverse_period=4)
KFAC = functools.partial(optim.kfac, 1e-2, CURVATURE, **PERIODS)
EKFAC = functools.partial(optim.ekfac, 1e-2, CURVATURE, **PERIODS)
IN_BASIS = dict(factor_period=2, basis_period=4)
QR = optim.Decomposition("qr", 0.1)
MAKES = {
  "kfac_muon_one_side": functools.partial(optim.kfac_muon, 1e-2, CUT, normuon=True, **IN_BASIS),
  "soap": functools.partial(optim.soap, 1e-2, basis_period=4),
  "ekfac_batch": functools.partial(EKFAC, moments="batch"),
  "ekfac_examples": functools.partial(EKFAC, moments="examples"),
  "kfac_qr": functools.partial(optim.scale_by_kfac, CURVATURE, decomposition=QR, **PERIODS),
  "kfac_factored": functools.partial(KFAC, damping_type="factored"),
  "kfac_one_side": functools.partial(optim.kfac, 1e-2, CUT, **PERIODS),
  "kfac_adam": functools.partial(optim.kfac_adam, 1e-2, CURVATURE, **IN_BASIS),
  "kfac_adam_one_side": functools.partial(optim.kfac_adam, 1e-2, CUT, **IN_BASIS),
  "kfac_adam_qr": functools.partial(optim.kfac_adam, 1e-2, CURVATURE, decomposition=QR, **IN_BASIS),
  "by_model": lambda: optim.by_quadratic_model(
    optim.scale_by_kfac(CURVATURE, **PERIODS), CURVATURE
  ),
  "kfac_muon": functools.partial(optim.kfac_muon, 1e-2, CURVATURE, **IN_BASIS),
  "corrected_shampoo": functools.partial(
    optim.shampoo, 1e-2, basis_period=4, corrected=True, max_factor=4
  ),
  "shampoo": functools.partial(optim.shampoo, 1e-2, basis_period=4),
  "muon": functools.partial(optim.muon, 1e-2),
  "normuon": functools.partial(optim.muon, 1e-2, normuon=True),
  "grafted_shampoo": lambda: optim.graft(optim.adam(1e-2), optim.shampoo(1e-2, basis_period=4)),
}


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.first(3)
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
