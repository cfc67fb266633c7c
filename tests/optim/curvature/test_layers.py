"""Every kind of layer against brute force in float64."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixer_jax import optim
from tests.optim.curvature.brute_force import Between, close, factors, kinds, of_layer, with_ones
from tests.optim.small_net import curvature, problem


def last(d_out):
  return lambda y: y.reshape(-1, d_out)


def axes_in(*axes):
  """A kernel as a matrix of these axes by the other ones."""

  def matrix(k):
    rest = [i for i in range(k.ndim) if i not in axes]
    return k.transpose(*axes, *rest).reshape(np.prod([k.shape[i] for i in axes]), -1)

  return matrix


def grouped(n):
  """A convolution's kernel [..., d_in, n d_out] as n matrices, and its outputs as their rows."""
  matrix = lambda k: k.reshape(-1, n, k.shape[-1] // n).swapaxes(0, 1)
  return matrix, lambda y: y.reshape(-1, n, y.shape[-1] // n)


def conv(*args, **options):
  return lambda: nn.Conv(*args, name="layer", **options)


def conv_transpose(*args, **options):
  return lambda: nn.ConvTranspose(*args, name="layer", **options)


def general(*args, **options):
  return lambda: nn.DenseGeneral(*args, name="layer", **options)


def einsum(*args, **options):
  return lambda: nn.Einsum(*args, name="layer", **options)


_MASK = np.array([[[1, 1, 0], [0, 1, 1]], [[1, 0, 1], [1, 1, 1]]], np.float32)
# The layer, the shape of its inputs, its kernel as a matrix and its outputs as rows.
CASES = {
  "dense": (lambda: nn.Dense(4, name="layer"), (3, 5), axes_in(0), last(4)),
  "tokens": (lambda: nn.Dense(4, name="layer"), (3, 2, 5), axes_in(0), last(4)),
  "general": (general((2, 3), axis=(1, 3)), (3, 2, 4, 3), axes_in(0, 1), last(6)),
  "general unsorted": (general(3, axis=(-1, 1)), (3, 2, 4, 3), axes_in(0, 1), last(3)),
  "general axis 1": (general(4, axis=1), (3, 5, 2), axes_in(0), last(4)),
  "einsum": (
    einsum((4, 2, 5), "bti,oki->btko"),
    *((3, 2, 5), axes_in(2), lambda y: y.swapaxes(2, 3).reshape(-1, 8)),
  ),
  "einsum ellipsis": (einsum((5, 4), "...i,io->...o"), (3, 2, 5), axes_in(0), last(4)),
  "einsum of matrices": (
    einsum((2, 4, 3), "btc,tcd->btd", use_bias=False),
    *((3, 2, 4), lambda k: k, lambda y: y),
  ),
  "conv": (conv(2, (3, 3), strides=(2, 1)), (3, 4, 5, 2), axes_in(0, 1, 2), last(2)),
  "conv 1d": (conv(3, 3, padding="CAUSAL"), (3, 5, 2), axes_in(0, 1), last(3)),
  "circular": (conv(2, (3, 3), padding="CIRCULAR"), (3, 4, 4, 2), axes_in(0, 1, 2), last(2)),
  "padded": (
    conv(2, (2, 3), padding=((1, 2), (0, 1)), kernel_dilation=2),
    *((3, 4, 5, 2), axes_in(0, 1, 2), last(2)),
  ),
  "patches": (
    conv(2, (2, 2), strides=(2, 2), padding="VALID"),
    *((3, 5, 4, 2), axes_in(0, 1, 2), last(2)),
  ),
  "input dilation": (
    conv(2, (3, 2), input_dilation=2, padding=((1, 1), (0, 2))),
    *((3, 3, 4, 2), axes_in(0, 1, 2), last(2)),
  ),
  "groups": (conv(6, (3, 2), feature_group_count=2), (3, 4, 3, 4), *grouped(2)),
  "depthwise": (
    conv(6, (3, 3), strides=2, kernel_dilation=(2, 1), feature_group_count=3),
    *((3, 5, 4, 3), *grouped(3)),
  ),
  "local": (
    lambda: nn.ConvLocal(3, (2,), use_bias=False, name="layer"),
    *((3, 4, 2), lambda k: k, lambda y: y),
  ),
  "transposed": (
    conv_transpose(2, (3, 3), strides=(2, 2)),
    *((3, 2, 3, 2), axes_in(0, 1, 2), last(2)),
  ),
  "transposed kernel": (
    conv_transpose(2, (2, 3), strides=(2, 1), padding="VALID", transpose_kernel=True),
    *((3, 2, 2, 3), lambda k: axes_in(0, 1, 3)(k[::-1, ::-1]), last(2)),  # as it is seen
  ),
  "mask": (conv(3, 2, mask=_MASK), (3, 4, 2), axes_in(0, 1), last(3)),
}


_FIRST = (
  "tokens",
  "general",
  "einsum",
  "conv",
  "padded",
  "groups",
  "local",
  "transposed kernel",
  "mask",
)


@pytest.mark.parametrize("name", sorted(CASES, key=lambda name: name not in _FIRST))
@pytest.mark.first(len(_FIRST))
def test_a_layer_equals_brute_force(name):
  make, shape, matrix, rows = CASES[name]
  model = Between(make)
  x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
  params = jax.jit(model.init)(jax.random.key(0), x)["params"]
  params = jax.tree.map(lambda p: p + 0.1, params)
  unmasked = Between(conv(3, 2)) if name == "mask" else model  # A has all inputs
  hidden = params["layer"]["kernel"] * (_MASK if name == "mask" else 1)
  plain = params | {"layer": params["layer"] | {"kernel": hidden}}
  a, g = of_layer(unmasked, plain, x, matrix, rows)
  predict = lambda p, x: model.apply({"params": p}, x)
  # An example batch of another size than the batch at hand.
  options = dict(estimation="exact", token_averaging="expand")
  found = optim.Curvature(predict, params, x[:2], **options).factors(params, x)["layer"]
  close(found.inputs, a, atol=1e-5)
  close(found.outputs, g)


class Attention(nn.Module):
  """A query of one token, which attends to all of them."""

  @nn.compact
  def __call__(self, x):
    x = nn.MultiHeadDotProductAttention(2, qkv_features=4, name="attention")(x[:, :1], x)
    return nn.Dense(3, name="head")(x[:, 0])


class Words(nn.Module):
  """The embedding of one word."""

  @nn.compact
  def __call__(self, ids):
    return nn.Dense(3, name="head")(nn.tanh(nn.Embed(7, 4, name="words")(ids)[:, 0]))


@pytest.mark.parametrize("model", [Attention(), Words()])
def test_the_fisher_matrix_of_one_row_is_its_product_of_factors(model):
  """Against J^T (diag(p) - p p^T) J of the layer's parameters, in float64."""
  rng = np.random.default_rng(0)
  x = np.array([[4]]) if isinstance(model, Words) else np.float32(rng.normal(size=(1, 3, 4)))
  shapes = jax.eval_shape(model.init, jax.random.key(0), x)["params"]
  params = jax.tree.map(lambda p: np.float32(0.5 * rng.normal(size=p.shape)), shapes)
  predict = lambda p, x: model.apply({"params": p}, x)
  found = factors(predict, params, x)
  with jax.enable_x64(True):
    wide = jax.tree.map(np.float64, params)
    jacobian = jax.jacobian(lambda p: predict(p, x)[0])(wide)
    p = np.asarray(jax.nn.softmax(predict(wide, x)[0]))
  one_row = {"attention/query", "attention/out", "words", "head"} & found.keys()
  assert len(one_row) >= 2
  for name in one_row:
    own = functools.reduce(lambda tree, key: tree[key], name.split("/"), jacobian)
    a, g = found[name]
    a = np.diag(a.values) if name == "words" else a
    rows = [np.reshape(own[k], (3, -1, len(g))) for k in sorted(own, reverse=True)]
    j = np.concatenate(rows, axis=1).reshape(3, -1)  # the kernel, then the bias
    expected = j.T @ (np.diag(p) - np.outer(p, p)) @ j
    assert np.abs(expected).max() > 1e-3
    close(np.kron(a, g), expected, atol=1e-5 * np.abs(expected).max())


NORMS = {
  "layer": lambda: nn.LayerNorm(name="norm"),
  "rms": lambda: nn.RMSNorm(name="norm"),
  "group": lambda: nn.GroupNorm(num_groups=2, name="norm"),
  "batch": lambda: nn.BatchNorm(use_running_average=True, name="norm"),
  "other axis": lambda: nn.LayerNorm(feature_axes=1, reduction_axes=1, name="norm"),
}


class Normalised(nn.Module):
  kind: str

  @nn.compact
  def __call__(self, x):
    x = NORMS[self.kind]()(x)
    return nn.Dense(3, name="head")(nn.tanh(x).mean(axis=1))


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.first(2)
def test_diagonals_of_normalisations_equal_brute_force(kind):
  """The mean of the squared gradients of single examples."""
  x = np.random.default_rng(0).normal(size=(5, 2, 4)).astype(np.float32)
  variables = jax.jit(Normalised(kind).init)(jax.random.key(0), x)
  params = jax.tree.map(lambda p: p + 0.2, variables["params"])
  rest = {k: v for k, v in variables.items() if k != "params"}
  apply = lambda p, x: Normalised(kind).apply({"params": p, **rest}, x)
  names = {f"norm/{name}" for name in params["norm"]}
  assert kinds(apply, params, x) == dict.fromkeys(names, "gradient") | {"head": "kronecker"}
  found = factors(apply, params, x, norms="diagonal")
  log_loss = lambda p, x, y: -jax.nn.log_softmax(apply(p, x[None])[0])[y]
  every = jax.vmap(jax.vmap(jax.grad(log_loss), (None, None, 0)), (None, 0, None))
  grads = jax.jit(every)(params, x, jnp.arange(3))["norm"]
  weights = jax.nn.softmax(apply(params, x))
  for name, own in grads.items():
    [values] = found[f"norm/{name}"].values
    close(values, np.einsum("iy,iyc->c", weights, np.square(own)) / 5)


def test_a_wide_side_is_diagonal_unless_its_limit_is_higher():
  params, batch = problem()
  blocks = lambda limit: {
    b.name: b.diagonal for b in curvature(params, batch, max_factor=limit).blocks
  }
  both, neither = (True, True), (False, False)
  assert blocks(5) == {"one": both, "two": (True, False)}
  assert blocks({"^two/": None, "": 5}) == {"one": both, "two": neither}
  assert blocks({"^two/kernel": 6, "": None}) == {"one": neither, "two": (True, False)}
  full = curvature(params, batch, estimation="exact").factors(params, batch)
  cut = curvature(params, batch, estimation="exact", max_factor=5).factors(params, batch)
  close(cut["two"].inputs.values, np.diag(full["two"].inputs))
  close(cut["two"].outputs, full["two"].outputs)
  close(cut["one"].outputs.values, np.diag(full["one"].outputs))


class Subclass(nn.Dense):
  """A layer that changes its inputs and outputs."""

  def __call__(self, x):
    return nn.relu(super().__call__(2 * x))


class Bare(nn.Module):
  """A layer of one's own, whose kernel has any name and takes keywords."""

  @nn.compact
  def __call__(self, *, x):
    return x @ self.param("w", nn.initializers.normal(0.5), (5, 4)) + self.param(
      "shift", nn.initializers.normal(0.5), (4,)
    )


def test_layers_of_ones_own_have_the_factors_of_plain_products():
  x = np.random.default_rng(0).normal(size=(6, 3, 5)).astype(np.float32)
  p = jax.jit(Bare().init)(jax.random.key(0), x=x)["params"]
  mean = lambda y: nn.tanh(y).mean(axis=1)
  dense = lambda p, x: mean(nn.Dense(4).apply({"params": p}, x))
  by_hand = lambda p, x: mean(x @ p["w"] + p["shift"])
  own = lambda p, x: mean(Bare().apply({"params": p}, x=x))
  of_list = lambda p, x: mean(Bare().apply({"params": p}, x=jnp.stack(list(x))))
  [wanted] = factors(dense, {"kernel": p["w"], "bias": p["shift"]}, x).values()
  a = with_ones(x).reshape(-1, 6)
  close(wanted.inputs, a.T @ a / len(a))
  for predict in (by_hand, own, of_list):
    [found] = factors(predict, p, x).values()
    close(found, wanted)
  sub = lambda p, x: mean(Subclass(4).apply({"params": p}, x))
  plain = lambda p, x: mean(nn.relu(nn.Dense(4).apply({"params": p}, 2 * x)))
  params = {"kernel": p["w"], "bias": p["shift"]}
  close(factors(sub, params, x), factors(plain, params, x))


class Spectral(nn.Module):
  """A real layer of Fourier coefficients."""

  @nn.compact
  def __call__(self, x):
    y = nn.Dense(4, use_bias=False, name="layer")(jnp.fft.rfft(x, axis=1))
    return nn.Dense(3, name="head")(jnp.fft.irfft(y, axis=1).mean(axis=1))


def test_a_layer_of_complex_numbers_has_none_of_a_wrong_value():
  """Its rows would be complex; what has no layer takes the plain gradient."""
  x = np.sin(np.arange(48, dtype=np.float32)).reshape(2, 6, 4)
  params = jax.jit(Spectral().init)(jax.random.key(0), x)["params"]
  predict = lambda p, x: Spectral().apply({"params": p}, x)
  assert kinds(predict, params, x) == {"head": "kronecker", "layer/kernel": "gradient"}
