"""One optimizer after another: as by hand, from the parameters of its beginning on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from mixer_jax import optim
from tests.optim.two_layers import predict, sequence

PARAMS, BATCH, _ = sequence()[0]
FALLING = optax.exponential_decay(0.1, 1, 0.5)  # of the update count
CURVATURE = optim.Curvature(predict, PARAMS, BATCH, estimation="exact")


def far(params):
  """An optimizer whose state has the parameters that it began with, which it goes back to."""
  del params

  def update(updates, state, params=None):
    return jax.tree.map(lambda w, p: 0.1 * (w - p), state, params), state

  return optax.GradientTransformation(lambda params: params, update)


MAKES = {
  "adam": lambda: optim.adam(FALLING),
  "lbfgs": optim.lbfgs,
  "ssbroyden": optim.ssbroyden,
  "kfac": lambda: optim.kfac(FALLING, CURVATURE, factor_period=2, inverse_period=2),
  "sgd": lambda: optim.sgd(FALLING),
  "far": lambda: far(None),
}
PAIRS = (("kfac", "far"), ("lbfgs", "kfac"), ("adam", "ssbroyden"))


def loss(params):
  logits, labels = predict(params, BATCH)
  return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def run(tx, params, updates, state=None):
  """Each update is a call of one compiled step; parameters of all ends, and the last state."""
  tx, ends = optax.with_extra_args_support(tx), []

  @jax.jit
  def step(params, state):
    value, grads = jax.value_and_grad(loss)(params)
    extra = dict(batch=BATCH, rng=jax.random.key(0), value=value, value_fn=loss)
    moved, state = tx.update(grads, state, params, **extra)
    return optax.apply_updates(params, moved), state

  state = tx.init(params) if state is None else state
  for _ in range(updates):
    params, state = step(params, state)
    ends.append(params)
  return ends, state


def equal(found, wanted):
  jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.parametrize("names", PAIRS, ids="_".join)
@pytest.mark.first(1)
def test_it_is_one_by_hand_after_the_other_to_the_bit(names):
  first, second = (MAKES[name]() for name in names)
  found, state = run(optim.in_turn([first, second], boundaries=[3]), PARAMS, 7)
  begun, early = run(first, PARAMS, 3)
  ended, late = run(second, begun[-1], 4)
  equal(found, begun + ended)
  assert (state.count, state.turn) == (7, 1)
  equal(state.states, (early, late))


def test_three_in_turn_in_a_scan_and_from_a_checkpoint(tmp_path):
  tx = optim.in_turn([MAKES[n]() for n in ("sgd", "far", "adam")], boundaries=[2, 5])
  ends, last = run(tx, PARAMS, 8)
  begun, _ = run(MAKES["sgd"](), PARAMS, 2)
  middle, _ = run(MAKES["far"](), begun[-1], 3)
  ended, _ = run(MAKES["adam"](), middle[-1], 3)
  equal(ends, begun + middle + ended)

  def body(carry, _):
    params, state = carry
    moved, state = tx.update(jax.grad(loss)(params), state, params)
    return (optax.apply_updates(params, moved), state), None

  (scanned, _), _ = jax.jit(lambda c: jax.lax.scan(body, c, length=8))((PARAMS, tx.init(PARAMS)))
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), scanned, ends[-1])
  for kept in (2, 4):  # at a boundary and after it
    early, state = run(tx, PARAMS, kept)
    with ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(tmp_path / str(kept), state)
      checkpointer.wait_until_finished()
      state = checkpointer.restore(tmp_path / str(kept), jax.eval_shape(tx.init, PARAMS))
    again, state = run(tx, early[-1], 8 - kept, state)
    equal((again[-1], state), (ends[-1], last))


def test_all_get_the_extra_arguments_and_updates_keep_their_types():
  seen = []

  def recording(number):
    def update(updates, state, params=None, *, mine, **extra):
      seen.append((number, mine, sorted(extra)))
      wide = jax.tree.map(lambda u: u.astype(jnp.float32), updates)
      return (wide if number else updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)

  tx = optim.in_turn([recording(0), recording(1)], boundaries=[1])
  params = {"w": jnp.ones(3, jnp.bfloat16)}
  moved, _ = tx.update(params, tx.init(params), params, mine=5, other=6)
  assert sorted(seen) == [(0, 5, ["other"]), (1, 5, ["other"])]
  assert moved["w"].dtype == jnp.bfloat16


def test_wrappers_of_optax():
  make = lambda: optim.in_turn([optim.sgd(0.1), optim.adam(0.1)], boundaries=[2])
  grads = jax.tree.map(np.ones_like, PARAMS)
  state = make().init(PARAMS)
  same = optax.tree_map_params(make(), lambda x: x, state)
  equal(same, state)
  parts = optax.multi_transform({"a": make(), "b": optax.set_to_zero()}, {"one": "a", "two": "b"})
  alone, wrapped = make().init(PARAMS), parts.init(PARAMS)
  for _ in range(4):
    wanted, alone = make().update(grads, alone, PARAMS)
    found, wrapped = parts.update(grads, wrapped, PARAMS)
    equal(found["one"], wanted["one"])
    assert not any(np.any(x) for x in jax.tree.leaves(found["two"]))
