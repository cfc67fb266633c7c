"""Numbers of fewer bits: operands of products, parameters and activations; training stays the same."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mixer_jax import optim
from mixer_jax.optim import algebra
from mixer_jax.optim.curvature import views
from mixer_jax.optim.curvature.blocks import Block, Kronecker
from mixer_jax.optim.ekfac import precondition as by_moments
from tests.optim.test_conventions import BATCH, GRADIENTS, MAKES, PARAMS, curvature, made, run

STEPS = 60
_FIRST = ("adam", "soap", "kfac", "ekfac", "gauss_newton")


def rounded(x):
  return np.asarray(x, jnp.bfloat16).astype(np.float32)


def block_of(d_in, d_out):
  whole = views.whole(0, (d_in, d_out))
  shape = d_in, d_out
  return Block("one", "kronecker", ("one/kernel",), (shape,), shape, views=(whole,))


@pytest.mark.parametrize("damping_type", ["exact", "factored", "moments"])
def test_operands_are_rounded_and_sums_are_not(damping_type):
  """K-FAC's eigenbases and inverses, and EK-FAC's second moments of one batch's gradient."""
  rng, block = np.random.default_rng(0), block_of(48, 32)
  v, a, g = (rng.normal(size=s).astype(np.float32) for s in ((48, 32), (48, 48), (32, 32)))
  s, t = (rng.uniform(1, 2, n).astype(np.float32) for n in (48, 32))
  moments = rng.uniform(1, 2, (48, 32)).astype(np.float32)
  factored = damping_type == "factored"
  basis, gradients = (algebra.Eigen(s, a), algebra.Eigen(t, g)), {"one/kernel": v}
  product = lambda x, y: rounded(x) @ rounded(y)
  if damping_type == "moments":
    found, seen = by_moments(block, gradients, basis, moments, 2.0, 0.9, 0.5, "bfloat16")
    turned = product(product(a.T, v), g)
    moments = 0.9 * moments + 0.1 * 2.0 * turned**2
    assert seen.dtype == jnp.float32
    np.testing.assert_allclose(seen, moments, rtol=1e-4, atol=2e-3)
  else:
    found = algebra.precondition(block, gradients, (a, g) if factored else basis, 0.5, "bfloat16")
    moments = np.outer(s, t)
  if not factored:
    v = product(product(a.T, v), g) / (moments + 0.5)
    a, g = a, g.T
  expected = product(product(a, v), g)
  assert found.dtype == jnp.float32
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-3)
  error = np.abs(expected - np.float64(a) @ v @ g).max()
  assert error > 0.05  # the rounding is there to be seen


@pytest.mark.parametrize("name", sorted(MAKES, key=lambda name: name not in _FIRST))
@pytest.mark.first(len(_FIRST))
def test_steps_of_bfloat16_are_those_of_float32_within_its_rounding(name):
  """Parameters, gradients and activations of 16 bits, against the same numbers in float32."""
  narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (PARAMS, GRADIENTS, BATCH["x"]))
  wide = jax.tree.map(lambda x: x.astype(np.float32), narrow)

  def steps(dtype, params, gradients, x):
    batch = BATCH | {"x": x}
    return run(made(name, 0.1, curvature(dtype)), params, gradients, batch=batch)

  flat = lambda u: np.concatenate(
    [np.float32(x).reshape(len(x), -1) for x in jax.tree.leaves(u)], 1
  )
  found, wanted = flat(steps("bfloat16", *narrow)), flat(steps("float32", *wide))
  error = np.linalg.norm(found - wanted, axis=1)
  # Gauss-Newton's damping falls, and a smaller one makes more of an error.
  limit = 0.05 if name == "gauss_newton" else 0.02
  assert np.all(error <= limit * np.linalg.norm(wanted, axis=1)), error


def precisions(jaxpr):
  """The precisions of all matrix products of a program, the branches of all platforms included."""
  for equation in jaxpr.eqns:
    if equation.primitive.name == "dot_general":
      yield equation.params["precision"]
    for inner in filter(lambda x: hasattr(x, "eqns"), jax.tree.leaves(equation.params)):
      yield from precisions(inner)


@pytest.mark.parametrize("method", ["products", "platform"])
@pytest.mark.parametrize("kind", ["inverses", "bases"])
def test_decompositions_keep_all_bits_where_products_have_fewer(kind, method):
  """A GPU's TF32, or a TPU's bfloat16, would be the default there."""
  moment = lambda d: jnp.eye(d) + 0.1
  factors = {"a": Kronecker(moment(4), moment(3))}
  old = {"a": tuple(algebra.Eigen(jnp.ones(d), jnp.eye(d)) for d in (4, 3))}
  how = algebra.Decomposition("qr", linear_algebra=method)
  make = {
    "inverses": lambda f: algebra.factored_inverses(f, 0.1, method=method),
    "bases": lambda f: algebra.renewed_bases(f, old, jnp.int32(1), how),
  }[kind]
  with jax.default_matmul_precision("bfloat16"):
    found = list(precisions(jax.make_jaxpr(make)(factors).jaxpr))
  assert found and set(found) == {(jax.lax.Precision.HIGHEST,) * 2}


class Net(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.Dense(4)(nn.gelu(nn.Dense(32)(x)))


def trainer(products="float32", bits=None, dtype="float32"):
  """From a seed of K-FAC's samples to the losses of its steps, on labels that another net gives.

  Operands of preconditioning keep `bits` after the first; NVIDIA's TF32 has 10. Parameters and
  activations have the dtype.
  """
  x = jax.random.normal(jax.random.key(0), (STEPS, 64, 16))
  y = jnp.argmax(Net().apply(Net().init(jax.random.key(1), x[0]), x), axis=-1)
  params = jax.jit(Net().init)(jax.random.key(2), x[0])["params"]
  x, params = jax.tree.map(lambda z: z.astype(dtype), (x, params))
  predict = lambda params, batch: Net().apply({"params": params}, batch)

  def loss(params, x, y):
    logits = predict(params, x).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

  options = dict(damping=1e-2, factor_period=1, inverse_period=5, factor_decay=0.8)
  options |= dict(decomposition=optim.Decomposition(products=products))
  direction = optim.scale_by_kfac(optim.Curvature(predict, params, x[0]), **options)
  tx = optax.chain(direction, optax.trace(0.9, accumulator_dtype=jnp.float32), optax.scale(-0.01))
  few = lambda z: jax.lax.reduce_precision(z, exponent_bits=8, mantissa_bits=bits)
  whole = jnp.matmul

  def update(*args, **extra):
    with pytest.MonkeyPatch.context() as patch:
      if bits is not None:
        patch.setattr(jnp, "matmul", lambda x, y, **how: whole(few(x), few(y), **how))
      return tx.update(*args, **extra)

  def step(carry, i):
    params, state, seed = carry
    value, grads = jax.value_and_grad(loss)(params, x[i], y[i])
    key = jax.random.fold_in(jax.random.key(seed), i)
    updates, state = update(grads, state, params, batch=x[i], rng=key)
    return (optax.apply_updates(params, updates), state, seed), value

  train = jax.jit(lambda carry: jax.lax.scan(step, carry, jnp.arange(STEPS)))
  return lambda seed: np.asarray(train((params, tx.init(params), jnp.int32(seed)))[1])


@functools.cache
def exact():
  """The losses in float32, and how far other labels drawn for the Fisher matrix lead from them."""
  train = trainer()
  losses = train(0)
  assert losses[-10:].mean() < 0.5 * losses[0]
  return losses, np.abs(losses - train(1)).mean()


# What changes, and between which parts of the change by other labels the losses must be.
CHANGES = {
  "bfloat16 operands": (dict(products="bfloat16"), 0.0, 0.1),
  "TF32 operands": (dict(bits=10), 0.0, 0.02),
  "operands of two bits": (dict(bits=2), 0.5, np.inf),
  "bfloat16 parameters": (dict(dtype="bfloat16"), 0.0, 0.5),
}


@pytest.mark.parametrize("change", CHANGES)
def test_training_changes_less_than_by_other_labels(change):
  options, least, most = CHANGES[change]
  losses, others = exact()
  assert least < np.abs(trainer(**options)(0) - losses).mean() / others < most


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
@pytest.mark.first(1)
def test_weights_of_any_type_are_summed_in_float32(dtype):
  """The sum of 90,000 ones is none of float16."""
  x = np.random.default_rng(0).normal(size=(300, 300, 2)).astype(np.float32)
  params = {"kernel": jnp.ones((2, 3)).at[0, 0].set(2.0)}

  def factors(dtype):
    weights = jnp.ones((300, 300), dtype)
    y = lambda p, b: (nn.Dense(3, use_bias=False).apply({"params": p}, b[0]), None, b[1])
    batch = x, weights
    rng = jax.random.key(0)
    return optim.Curvature(y, params, batch).factors(params, batch, rng)["kernel"]

  with jax.enable_x64(dtype == np.float64):
    found = factors(dtype)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, factors(np.float32))
