"""The same functions in five frameworks: their factors against those by hand in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixer_jax import optim
from mixer_jax.optim.trees import by_path
from tests.optim.curvature.brute_force import close

pytest.importorskip("equinox")
pytest.importorskip("haiku")

from tests.optim.curvature import frameworks


class Tape:
  """Products of one example written by hand: their rows, and offsets that differentiate them."""

  def __init__(self, weights, offsets=None):
    self.weights, self.offsets, self.rows, self.outputs = weights, offsets, [], []

  def __call__(self, name, a, bias=True, transposed=False):
    """The product of rows a [..., d_in], and the layer's bias if it has one and is wanted."""
    matrix, *rest = self.weights[name]
    ones = jnp.full((*a.shape[:-1], 1), float(bias))
    self.rows.append((name, transposed, jnp.concatenate([a, *[ones] * len(rest)], axis=-1)))
    y = a @ (matrix.T if transposed else matrix) + (rest[0] if bias and rest else 0.0)
    y = y if self.offsets is None else y + self.offsets[len(self.outputs)]
    self.outputs.append(y)
    return y


def attention(layer, x):
  q, k, v = (layer(n, x) for n in ("query", "key", "value"))
  mixed = []
  for half in (slice(0, 2), slice(2, 4)):
    scores = jnp.exp(q[:, half] @ k[:, half].T / np.sqrt(2))
    mixed.append(scores / scores.sum(1, keepdims=True) @ v[:, half])
  return layer("head", layer("out", jnp.concatenate(mixed, axis=1)).mean(0))


def convnet(layer, x):
  def conv(name, x, size):
    n = (len(x) - size) // 2 + 1
    cut = [
      x[2 * i : 2 * i + size, 2 * j : 2 * j + size].ravel() for i in range(n) for j in range(n)
    ]
    return jnp.tanh(layer(name, jnp.stack(cut))).reshape(n, n, -1)

  # "SAME" of stride 2, 8 places and a kernel of 3 is one place of zeros at the end.
  x = conv("one", jnp.pad(x, ((0, 1), (0, 1), (0, 0))), 3)
  return layer("head", conv("two", x, 2).ravel())


def tied(layer, ids):
  x = layer("table", jax.nn.one_hot(ids, 7))
  return layer("table", jnp.tanh(layer("hidden", x)).mean(0), transposed=True)


def scanned(layer, x):
  return layer("head", jnp.tanh(layer("1", jnp.tanh(layer("0", x)))))


def recurrent(layer, x):
  h = jnp.zeros(4)
  for row in x:
    h = jnp.tanh(layer("in", row) + layer("state", h))
  return layer("head", h)


def pinn(layer, x):
  """u^2 and the second derivative by each coordinate; of first ones both levels make their own."""
  u = layer("three", jnp.tanh(layer("two", jnp.tanh(layer("one", x)))))
  total = u**2
  linear = functools.partial(layer, bias=False)
  for direction in jnp.eye(2):
    a, inner, outer, second = x, direction, direction, None
    for name in ("one", "two", "three"):
      if name == "three":  # the Laplacian has no need of its value and slopes
        total = total + linear(name, second)
        break
      z, inner, outer = layer(name, a), linear(name, inner), linear(name, outer)
      second = 0.0 if second is None else linear(name, second)
      a = jnp.tanh(z)
      slope = 1 - a**2
      second = slope * second - 2 * a * slope * inner * outer
      inner, outer = slope * inner, slope * outer
  return total


@functools.cache
def by_hand(model):
  """The factors (A, G) of each layer, "expand", by name."""
  function = globals()[model]
  with jax.enable_x64(True):
    weights, batch = frameworks.weights(model), jnp.asarray(frameworks.batch(model))
    batch = batch if model == "tied" else batch.astype(jnp.float64)

    def of_example(x):
      tape = Tape(weights)
      function(tape, x)
      offsets = [jnp.zeros(y.shape) for y in tape.outputs]

      def shifted(offsets):
        return function(Tape(weights, offsets), x)

      return [a for *_, a in tape.rows], shifted(offsets), jax.jacrev(shifted)(offsets)

    rows, outputs, jacobians = jax.jit(jax.vmap(of_example))(batch)
    tape = Tape(weights)
    function(tape, batch[0])
    p = np.asarray(jax.nn.softmax(outputs))
  fisher = np.stack([np.diag(q) - np.outer(q, q) for q in p])
  if frameworks.LIKELIHOODS.get(model) == "normal":
    fisher = 2 * np.ones((len(p), 1, 1))  # the second derivative of a square
  sums = {}
  for (name, transposed, _), a, j in zip(tape.rows, rows, jacobians):
    a = np.asarray(a).reshape(-1, a.shape[-1])
    j = np.asarray(j).reshape(*p.shape, -1, j.shape[-1])
    g = np.einsum("bitp,bij,bjtq->pq", j, fisher, j) / len(p)
    own = sums.setdefault(name, {}).setdefault(transposed, [0, 0, 0])
    sums[name][transposed] = [x + y for x, y in zip(own, (a.T @ a, g, len(a)))]
  return {name: combined(own) for name, own in sums.items()}


def combined(sums):
  """One product for uses, and for transposed ones whose inputs stand on the side of outputs."""
  a, g, n = sums[False]
  if len(sums) == 1:
    return a / n, g
  h, d, m = sums[True]
  pairs = [(a / n, g), (d, h / m)]
  share = np.array([np.trace(a) * np.trace(g) for a, g in pairs])
  unit = [[x / np.trace(x) for x in pair] for pair in pairs]
  mix = lambda i: sum(s * pair[i] for s, pair in zip(share / share.sum(), unit))
  a, g = (np.sqrt(share.sum()) * mix(i) for i in (0, 1))
  return np.diag(np.diag(a)), g  # a table's side of words is a diagonal


def found(framework, model):
  """The same factors of a framework, in the order of rows of the weights by hand."""
  predict, params, batch = frameworks.build(framework, model)
  likelihood = frameworks.LIKELIHOODS.get(model, "categorical")
  options = dict(likelihood=likelihood, estimation="exact", token_averaging="expand")
  curvature = optim.Curvature(predict, params, batch, **options)
  assert {block.kind for block in curvature.blocks} == {"kronecker"}, str(curvature)
  factors, layers = curvature.factors(params, batch), {}
  leaves = by_path(params)
  for block in curvature.blocks:
    name, matrix = block.name, block.matrix([leaves[path] for path in block.paths])
    wide = lambda x, n: np.diag(x.values) if isinstance(x, optim.Diagonals) else np.asarray(x)
    both = [wide(f, n) for f, n in zip(factors[name], matrix.shape[-2:])]
    for m, a, g in zip(*(x.reshape(-1, *x.shape[-2:]) for x in (np.asarray(matrix), *both))):
      for own, (kernel, *bias) in frameworks.weights(model).items():
        wanted = np.concatenate([kernel, *(b[None] for b in bias)])
        if wanted.shape == m.shape and np.allclose(np.sort(m, 0), np.sort(wanted, 0), atol=1e-5):
          order = np.abs(m[None] - wanted[:, None]).sum(-1).argmin(1)
          layers[own] = a[np.ix_(order, order)], g
  return layers


# Every function and every framework is looked at by default; the other pairs are thorough.
DEFAULT = {
  "plain": ("attention",),
  "linen": ("convnet",),
  "nnx": ("recurrent",),
  "equinox": ("tied", "pinn"),
  "haiku": ("scanned",),
}
CASES = [
  pytest.param(
    f, model, marks=[pytest.mark.thorough] * (model not in DEFAULT[f]), id=f"{f}-{model}"
  )
  for f in frameworks.FRAMEWORKS
  for model in frameworks.SIZES
]


@pytest.mark.parametrize("framework, model", CASES)
def test_factors_equal_those_by_hand(framework, model):
  layers = found(framework, model)
  assert layers.keys() == frameworks.SIZES[model].keys()
  for name, wanted in by_hand(model).items():
    for side in (0, 1):
      size = np.abs(wanted[side]).max()
      close(layers[name][side] / size, wanted[side] / size, rtol=0, atol=2e-6)
