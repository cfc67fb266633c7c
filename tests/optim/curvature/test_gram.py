"""J J^T from the rows of layers against the explicit Jacobian, in float64."""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixer_jax import optim
from mixer_jax.optim.curvature import gram
from mixer_jax.optim.curvature.curvature import tangent
from mixer_jax.optim.curvature.likelihoods import likelihood_of
from tests.optim.curvature.test_likelihoods import fisher_of_outputs


def dense(layer, x):
  return x @ layer["kernel"] + layer["bias"]


def layers(rng, *sizes):
  one = lambda n, m: {"kernel": rng.normal(size=(n, m)) / n**0.5, "bias": 0.1 * rng.normal(size=m)}
  return {f"layer{i}": one(n, m) for i, (n, m) in enumerate(itertools.pairwise(sizes))}


def mlp(params, x):
  for name in list(params)[:-1]:
    x = jnp.tanh(dense(params[name], x))
  return dense(list(params.values())[-1], x)


def physics(rng):
  """A Laplacian inside, values on the boundary: terms with batches and weights of their own."""

  def predict(params, batch):
    u = lambda x: mlp(params, x)[0]
    laplace = lambda x: jnp.trace(jax.hessian(u)(x)) + jnp.sin(x).sum()
    return {
      "interior": jax.vmap(laplace)(batch["interior"])[:, None],
      "boundary": jax.vmap(u)(batch["boundary"])[:, None],
    }

  batch = {"interior": rng.uniform(size=(6, 2)), "boundary": rng.uniform(size=(4, 2))}
  likelihood = {"interior": (0.5, "normal"), "boundary": (3.0, "normal")}
  return predict, layers(rng, 2, 5, 4, 1), batch, likelihood


def classifier(rng):
  predict = lambda params, batch: (mlp(params, batch["x"]), batch["y"])
  batch = {"x": rng.normal(size=(6, 4)), "y": rng.integers(0, 3, 6)}
  return predict, layers(rng, 4, 5, 3), batch, "categorical"


def weighted(rng):
  predict = lambda params, batch: (mlp(params, batch["x"]), batch["y"], batch["w"])
  batch = {"x": rng.normal(size=(6, 4)), "y": rng.normal(size=(6, 2)), "w": rng.uniform(size=6)}
  return predict, layers(rng, 4, 5, 2), batch, (0.3, "normal")


def tied(rng):
  """An embedding that is the head, too."""

  def predict(params, batch):
    words = params["table"][batch["ids"]]
    return jnp.tanh(dense(params["mixed"], words)) @ params["table"].T, batch["ids"]

  params = {"table": rng.normal(size=(7, 3)), "mixed": layers(rng, 3, 3)["layer0"]}
  return predict, params, {"ids": rng.integers(0, 7, (3, 2))}, "categorical"


def scanned(rng):
  """Layers of a stack, each in one step of a loop."""

  def predict(params, batch):
    step = lambda x, layer: (x + jnp.tanh(dense(layer, x)), None)
    return jax.lax.scan(step, batch["x"], params["stack"])[0] @ params["head"]

  stack = jax.tree.map(lambda *x: np.stack(x), *(layers(rng, 4, 4)["layer0"] for _ in range(3)))
  params = {"stack": stack, "head": rng.normal(size=(4, 2))}
  return predict, params, {"x": rng.normal(size=(5, 4))}, "normal"


def recurrent(rng):
  """One matrix in all steps of a loop, whose rows are not told apart."""

  def predict(params, batch):
    step = lambda h, x: (jnp.tanh(dense(params["cell"], h) + x), None)
    return jax.vmap(lambda xs: jax.lax.scan(step, xs[0], xs)[0])(batch["x"]) @ params["head"]

  params = {"cell": layers(rng, 4, 4)["layer0"], "head": rng.normal(size=(4, 2))}
  return predict, params, {"x": rng.normal(size=(5, 3, 4))}, "normal"


def branched(rng):
  def predict(params, batch):
    one = lambda x: jax.lax.cond(
      x[0] > 0, lambda x: x @ params["a"], lambda x: jnp.sin(x @ params["a"]), x
    )
    return jax.vmap(one)(batch["x"]) @ params["b"]

  params = {"a": rng.normal(size=(4, 4)), "b": rng.normal(size=(4, 2))}
  return predict, params, {"x": rng.normal(size=(5, 4))}, "normal"


class Convnet(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.tanh(nn.Conv(4, (3, 3), param_dtype=float, name="conv")(x))
    x = nn.LayerNorm(param_dtype=float, name="norm")(x)
    x = nn.Conv(4, (3, 3), strides=2, feature_group_count=2, param_dtype=float, name="groups")(x)
    return nn.Dense(2, param_dtype=float, name="head")(x.mean((1, 2)))


class Mixer(nn.Module):
  @nn.compact
  def __call__(self, x):
    make = functools.partial(nn.Dense, param_dtype=float)
    x = x + make(5, name="tokens")(nn.LayerNorm(param_dtype=float)(x).mT).mT
    return make(2, name="head")(x + make(4, name="channels")(nn.LayerNorm(param_dtype=float)(x)))


def module(model, shape):
  def case(rng):
    x = rng.normal(size=shape)
    params = model().init(jax.random.key(0), x)["params"]
    params = jax.tree.map(lambda p: p + 0.1 * rng.normal(size=p.shape), params)
    return lambda p, b: model().apply({"params": p}, b["x"]), params, {"x": x}, "normal"

  return case


def masked(rng):
  mask = np.tri(4, 4)
  predict = lambda p, b: jnp.tanh(b["x"] @ (p["a"] * mask)) @ p["b"]
  params = {"a": rng.normal(size=(4, 4)), "b": rng.normal(size=(4, 2))}
  return predict, params, {"x": rng.normal(size=(5, 4))}, "normal"


def poisson(rng):
  """A likelihood of one's own."""
  own = optim.Likelihood(
    sample=lambda key, y: jax.random.poisson(key, jnp.exp(y)),
    gradient=lambda y, n: jnp.exp(y) - n,
    factor=lambda y, v: jnp.exp(0.5 * y) * v,
  )
  predict = lambda params, batch: (mlp(params, batch["x"]), batch["y"])
  batch = {"x": rng.normal(size=(6, 4)), "y": rng.integers(0, 5, (6, 2))}
  return predict, layers(rng, 4, 5, 2), batch, (0.7, own)


def equinox(rng):
  eqx = pytest.importorskip("equinox")
  model = eqx.nn.MLP(3, 2, 4, 2, dtype=float, key=jax.random.key(0))
  params, rest = eqx.partition(model, eqx.is_inexact_array)
  predict = lambda p, b: jax.vmap(eqx.combine(p, rest))(b["x"])
  return predict, params, {"x": rng.normal(size=(5, 3))}, "normal"


CASES = dict(
  physics=physics,
  classifier=classifier,
  weighted=weighted,
  tied=tied,
  scanned=scanned,
  recurrent=recurrent,
  branched=branched,
  convnet=module(Convnet, (3, 5, 5, 2)),
  mixer=module(Mixer, (3, 5, 4)),
  masked=masked,
  poisson=poisson,
  equinox=equinox,
)


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True):
    yield


@functools.cache
def made(name, examples=None, **options):
  """The curvature of a case, its parameters and a batch; with `examples`, of "weighted", so many."""
  predict, params, batch, likelihood = CASES[name](np.random.default_rng(0))
  if examples is not None:
    rng = np.random.default_rng(1)
    draw = lambda x: rng.uniform(0.1, 1.0, size=(examples, *x.shape[1:]))
    batch = {name: draw(x) for name, x in batch.items()}
  params, batch = jax.tree.map(jnp.asarray, (params, batch))
  return optim.Curvature(predict, params, batch, likelihood=likelihood, **options), params, batch


@functools.partial(jax.jit, static_argnums=0)
def jacobian(curvature, params, batch):
  """J of the residuals' pushes, one parameter at a time: forward mode alone."""
  flat, back = jax.flatten_util.ravel_pytree(params)
  push = curvature.residuals(params, batch).push
  return jax.vmap(lambda e: push(back(e)), out_axes=1)(jnp.eye(len(flat), dtype=flat.dtype))


def close(found, expected, rtol=1e-12):
  np.testing.assert_allclose(found, expected, rtol=0, atol=rtol * np.abs(expected).max())


_BOTH = [(name, "pairs") for name in CASES] + [(name, "jacobian") for name in CASES]


@pytest.mark.parametrize("name, by", _BOTH)
@pytest.mark.first(len(CASES) + 3)
def test_it_is_that_of_the_jacobian(name, by, monkeypatch):
  monkeypatch.setattr(gram, "_pairs_are_cheaper", lambda *sizes: by == "pairs")
  curvature, params, batch = made(name)
  found = jax.jit(curvature.gram)(params, batch)
  j = jacobian(curvature, params, batch)
  close(found, j @ j.T)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.first(5)
def test_columns_are_those_of_a_product_with_the_jacobian(name):
  curvature, params, batch = made(name)
  columns = jax.jit(curvature.jacobian)(params, batch)
  vector = jnp.asarray(np.random.default_rng(0).normal(size=columns.shape[1]))
  arrays = curvature.of_columns(vector, params, batch)
  push = curvature.residuals(params, batch).push
  close(columns @ vector, push(tangent(params, arrays)), 1e-11)


@pytest.mark.parametrize("name", ["physics", "classifier", "weighted", "tied"])
def test_the_jacobian_is_that_of_the_fisher_matrix(name):
  """J^T J against `quadratic`, which the rows' order has no part in, and against products."""
  curvature, params, batch = made(name)
  j = jacobian(curvature, params, batch)
  rng = np.random.default_rng(1)
  vectors = [jax.tree.map(lambda p: rng.normal(size=p.shape), params) for _ in range(2)]
  v = np.stack([jax.flatten_util.ravel_pytree(x)[0] for x in vectors], axis=1)
  both = lambda p, b, v: (curvature.quadratic(p, b, v), curvature.product(p, b, v[0]))
  quadratic, product = jax.jit(both)(params, batch, vectors)
  close((j @ v).T @ (j @ v), quadratic)
  close(jax.flatten_util.ravel_pytree(product)[0], j.T @ (j @ v[:, 0]))


def same(found, expected, rtol=1e-10):
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-12), found, expected
  )


def test_rows_of_classes_have_the_fisher_matrix_of_outputs():
  curvature, params, batch = made("classifier")
  logits = np.asarray(mlp(params, batch["x"]))
  outputs = jax.jacobian(lambda flat: mlp(back(flat), batch["x"]))
  flat, back = jax.flatten_util.ravel_pytree(params)
  dy = np.asarray(outputs(flat))
  whole = sum(d.T @ fisher_of_outputs("categorical", y) @ d for d, y in zip(dy, logits)) / 6
  j = jacobian(curvature, params, batch)
  close(j.T @ j, whole)


LOSSES = {
  "physics": lambda y, b: 0.5 * jnp.mean(y["interior"] ** 2) + 3.0 * jnp.mean(y["boundary"] ** 2),
  "classifier": lambda y, b: (
    -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(y[0]), b["y"][:, None], 1))
  ),
  "weighted": lambda y, b: 0.3 * jnp.sum(b["w"] * ((y[0] - b["y"]) ** 2).sum(1)) / jnp.sum(b["w"]),
  "poisson": lambda y, b: 0.7 * jnp.sum(jnp.exp(y[0]) - b["y"] * y[0]) / 6,
}


@pytest.mark.parametrize("name", LOSSES)
def test_residuals_have_the_gradient_of_the_loss(name):
  curvature, params, batch = made(name)
  predict = CASES[name](np.random.default_rng(0))[0]
  exact = jax.jit(jax.grad(lambda p: LOSSES[name](predict(p, batch), batch)))(params)
  found = jax.jit(lambda p, b: (space := curvature.residuals(p, b)).pull(space.vector))
  same(found(params, batch), exact)


@pytest.mark.parametrize("name", ["bernoulli", "normal_variance", "categorical", "normal"])
def test_the_roots_of_named_likelihoods(name):
  """B r is the slope."""
  rng, own = np.random.default_rng(0), likelihood_of((0.4, name))
  y, targets = (
    jnp.asarray(rng.normal(size=(5, 3))),
    jnp.asarray(rng.integers(0, 2, (5, 3)).astype(float)),
  )
  if name == "normal_variance":
    y = (y, jnp.exp(y[::-1]))
  targets = jnp.arange(5) % 3 if name == "categorical" else targets
  slopes = own.slopes(y, targets)
  for likelihood in (own, own._replace(roots=None)):  # by least squares, too
    same(own.factor(y, likelihood.residual(y, targets)), slopes, rtol=1e-9)


def test_parameters_left_out_are_constants():
  curvature, params, batch = made("physics")
  names = ["layer0/kernel", "layer1/kernel", "layer1/bias"]
  found = jax.jit(lambda p, b: curvature.gram(p, b, names))(params, batch)
  j, start = np.asarray(jacobian(curvature, params, batch)), 0
  kept = []
  for path, x in zip(curvature.names, jax.tree.leaves(params)):
    if path in names:
      kept.append(j[:, start : start + x.size])
    start += x.size
  kept = np.concatenate(kept, axis=1)
  close(found, kept @ kept.T)


def test_examples_that_mix():
  curvature, params, batch = made("classifier", in_axes=None)
  j = jacobian(curvature, params, batch)
  close(jax.jit(curvature.gram)(params, batch), j @ j.T)
