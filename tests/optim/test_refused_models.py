"""Models of which K-FAC would see a part, or nothing: each is refused by name, or seen in full."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mixer_jax import optim

_KEY = jax.random.key(0)


class Shared(nn.Module):
  """A normalisation and a layer in one scope; `first` is called first."""

  first: str

  @nn.compact
  def __call__(self, x):
    layers = {"dense": nn.Dense(2), "norm": nn.LayerNorm(use_bias=False)}
    for layer in layers.values():
      nn.share_scope(self, layer)
    for name in sorted(layers, key=lambda name: name != self.first):
      x = layers[name](x)
    return x


class Cell(nn.Module):
  """A layer of one's own that takes a pair."""

  curvature = "gradient"

  @nn.compact
  def __call__(self, carry, x):
    return carry[0] + x @ self.param("kernel", nn.initializers.ones, (2, 2))


class ByKeyword(nn.Module):
  curvature = "dense"

  @nn.compact
  def __call__(self, *, x):
    return x @ self.param("kernel", nn.initializers.ones, (2, 3))


class Field(nn.Module):
  """A scalar of each point."""

  first: type[nn.Module] = nn.Dense

  @nn.compact
  def __call__(self, x):
    return nn.Dense(1, name="two")(jnp.tanh(self.first(5, name="one")(x)))


class Force(nn.Module):
  """A layer on top of the derivative of a scalar."""

  @nn.compact
  def __call__(self, x):
    field = Field(name="field")
    return nn.Dense(2, name="top")(jnp.tanh(jax.grad(lambda x: field(x).sum())(x)))


_POINTS = np.cos(np.arange(16, dtype=np.float32)).reshape(8, 2)


def made(module, x=_POINTS):
  """A predict and its parameters."""
  params = jax.jit(module.init)(_KEY, x)["params"]
  return lambda params, x: module.apply({"params": params}, x), params


def factors(predict, params, x=_POINTS, **options):
  return optim.kfac_factors(predict, params, x, _KEY, likelihood="normal", **options)


field, _params = made(Field())
_DERIVATIVES = {
  "grad": lambda p, x: jax.grad(lambda x: field(p, x).sum())(x),
  "of each": lambda p, x: jax.vmap(jax.grad(lambda x: field(p, x)[0]))(x),
  "jit": lambda p, x: jax.jit(_DERIVATIVES["grad"])(p, x),
  "remat": lambda p, x: jax.grad(lambda x: jax.checkpoint(field)(p, x).sum())(x),
  "hessian": lambda p, x: jax.vmap(jax.hessian(lambda x: field(p, x)[0]))(x).reshape(len(x), -1),
  "jvp": lambda p, x: jax.jvp(lambda x: field(p, x), (x,), (jnp.ones_like(x),))[1],
  "beside": lambda p, x: jnp.concatenate([field(p, x), _DERIVATIVES["grad"](p, x)], axis=-1),
}


@pytest.mark.parametrize("first", ["dense", "norm"])
def test_layers_of_several_kinds_in_one_scope_are_refused(first):
  predict, params = made(Shared(first))
  with pytest.raises(ValueError, match="layers of several kinds share the scope of .*scale"):
    factors(predict, params)
  assert not factors(predict, params, plain=tuple(params))


def test_a_layer_of_the_plain_gradient_takes_any_input():
  model, params = Cell(), {"kernel": jnp.ones((2, 2))}
  predict = lambda params, x: model.apply({"params": params}, (x, x), x)
  [block] = optim.kfac_blocks(predict, params, _POINTS, likelihood="normal")
  assert block.kind == "gradient"


def test_an_input_that_is_no_array_by_position_is_refused_by_its_layer():
  for model, call, given in (
    (ByKeyword(), lambda m, v, x: m.apply(v, x=x), "ByKeyword takes keywords alone"),
    (nn.Dense(3), lambda m, v, x: m.apply(v, [1.0, 2.0]) * x[:, :1], "Dense takes a list"),
  ):
    predict = lambda p, x, model=model, call=call: call(model, {"params": p}, x)
    params = {"kernel": jnp.ones((2, 3))}
    params |= {"bias": jnp.ones(3)} if isinstance(model, nn.Dense) else {}
    with pytest.raises(ValueError, match=f"{given}; allowed: an array, by position"):
      factors(predict, params)


@pytest.mark.parametrize("predict", _DERIVATIVES.values(), ids=_DERIVATIVES)
def test_a_predict_that_differentiates_its_layers_is_refused(predict):
  with pytest.raises(ValueError, match="a derivative through the layer of one/kernel, one/bias"):
    factors(predict, _params)
  assert not factors(predict, _params, plain=".*")


def test_layers_beside_a_derivative_keep_their_blocks():
  predict, params = made(Force())
  with pytest.raises(ValueError, match="a derivative through the layer of field/one/kernel"):
    factors(predict, params)
  [found] = factors(predict, params, plain="^field/").values()
  inputs = jnp.tanh(_DERIVATIVES["grad"](params["field"], _POINTS))
  rows = np.concatenate([inputs, np.ones((8, 1))], axis=1)
  np.testing.assert_allclose(found.inputs, rows.T @ rows / 8, rtol=1e-5)


def test_a_derivative_that_is_taken_before_is_a_batch():
  slopes = _DERIVATIVES["grad"](_params, _POINTS)
  predict = lambda p, batch: (field(p, batch[0]), batch[1])
  assert factors(predict, _params, (_POINTS, slopes[:, :1])).keys() == {"one", "two"}


class Standardised(nn.Dense):
  """A layer that changes its kernel by its own `param`."""

  def param(self, name, *args, **kwargs):
    x = super().param(name, *args, **kwargs)
    return (x - x.mean(axis=0)) / x.std(axis=0) if name == "kernel" else x


def test_a_layer_that_changes_its_own_parameters_is_refused():
  predict, params = made(Field(Standardised))
  with pytest.raises(ValueError, match="the model changes one/kernel, one/bias before"):
    factors(predict, params)
  assert factors(predict, params, plain="^one/").keys() == {"two"}
  predict, params = made(Field(nn.remat(nn.Dense)))
  assert factors(predict, params).keys() == {"one", "two"}


class Declared(nn.Module):
  """A dense layer of one's own."""

  curvature = "dense"

  @nn.compact
  def __call__(self, x):
    return x @ self.param("kernel", nn.initializers.normal(1.0), (4, 4))


class Spectral(nn.Module):
  """A real layer, and maybe a normalisation, of Fourier coefficients."""

  layer: nn.Module

  @nn.compact
  def __call__(self, x):
    y = self.layer(jnp.fft.rfft(x, axis=1))
    return nn.Dense(3, name="head")(jnp.fft.irfft(y, axis=1).mean(axis=1))


@pytest.mark.parametrize(
  "layer, refused",
  [
    (nn.Dense(4), "layer/kernel.* .a Dense of complex numbers"),
    (Declared(), "layer/kernel.* .a Declared of complex numbers"),
    (nn.LayerNorm(), ""),
  ],
)
def test_layers_of_complex_numbers_have_no_block(layer, refused):
  x = np.sin(np.arange(48, dtype=np.float32)).reshape(2, 6, 4)
  predict, params = made(Spectral(layer), x)
  if refused:
    with pytest.raises(ValueError, match=refused):
      factors(predict, params, x)
  else:
    assert factors(predict, params, x, norms="diagonal").keys() == {"head"}
  assert factors(predict, params, x, plain="^layer/").keys() == {"head"}


def test_complex_outputs_are_refused():
  predict = lambda p, x: jnp.fft.rfft(field(p, x), axis=0)
  with pytest.raises(ValueError, match="outputs are complex64; allowed: real numbers"):
    factors(predict, _params)


class TiedEinsum(nn.Module):
  """One kernel for both directions."""

  @nn.compact
  def __call__(self, x):
    layer = nn.Einsum((4, 4), None, use_bias=False, name="tied")
    return layer(jnp.tanh(layer(x, "bi,io->bo")), "bo,io->bi")


def test_a_kernel_used_in_both_directions_is_refused():
  x = np.ones((5, 4), np.float32)
  predict, params = made(TiedEinsum(), x)
  with pytest.raises(ValueError, match="over one and over other axes of tied/kernel; list"):
    factors(predict, params, x)
  assert not factors(predict, params, x, plain="^tied/")


def test_an_einsum_that_takes_a_diagonal_of_its_kernel_is_refused():
  model = nn.Einsum((3, 3, 2), "bi,iio->bo", use_bias=False)
  x = jnp.ones((4, 3))
  params = model.init(jax.random.key(0), x)["params"]
  with pytest.raises(ValueError, match="an nn.Einsum bi,iio->bo, which is no matrix product"):
    optim.kfac_blocks(lambda p, x: model.apply({"params": p}, x), params, x)


class Scaled(nn.Module):
  """A layer whose parameter has another name, or shape, than its declaration wants."""

  declared: str
  name_of: str
  rank: int = 2

  @nn.compact
  def __call__(self, x):
    shape = (x.shape[-1],) * min(self.rank, 2) + (1,) * (self.rank - 2)
    w = self.param(self.name_of, nn.initializers.ones_init(), shape)
    y = x * w if self.rank == 1 else x @ w.reshape(shape[:2])
    return nn.Dense(3, name="head")(y)


@pytest.mark.parametrize(
  "declared, name, rank, message",
  [
    (
      "dense",
      "w",
      2,
      r"curvature is 'dense', but its parameters are w \[2, 2\]; allowed: a matrix",
    ),
    ("dense", "kernel", 3, r"its parameters are kernel \[2, 2, 1\]; allowed: a matrix of the name"),
    ("scale_and_shift", "gamma", 1, r"its parameters are gamma \[2\]; allowed: a scale and a bias"),
  ],
)
def test_a_declaration_that_the_parameters_do_not_fit(declared, name, rank, message):
  layer = type("Layer", (Scaled,), {"curvature": declared, "__call__": Scaled.__call__})
  predict, params = made(layer(declared, name, rank))
  with pytest.raises(ValueError, match=message):
    optim.kfac_blocks(predict, params, _POINTS)


class Heads(nn.Module):
  @nn.compact
  def __call__(self, x):
    return {name: nn.Dense(3, name=name)(x) for name in ("pi", "v")}


def test_several_outputs_that_are_no_mapping_of_likelihoods():
  both, params = made(Heads())
  with pytest.raises(ValueError, match="keys pi, v; allowed: a likelihood that is a mapping"):
    optim.kfac_blocks(both, params, _POINTS)
  two = lambda p, x: tuple(both(p, x).values())
  with pytest.raises(ValueError, match="no targets; .* for several outputs a mapping"):
    optim.kfac_blocks(two, params, _POINTS)
  weighted = lambda p, x: (both(p, x), None, {name: np.ones(8) for name in ("pi", "v")})
  likelihood = {"pi": "categorical", "v": "normal"}
  with pytest.raises(ValueError, match="weights are a mapping; allowed: one array"):
    optim.kfac_blocks(weighted, params, _POINTS, likelihood=likelihood)
  traces = []
  counted = lambda p, x: traces.append(1) or both(p, x)
  estimate = lambda: optim.kfac_factors(counted, params, _POINTS, _KEY, likelihood=dict(likelihood))
  estimate()
  once = len(traces)
  estimate()
  assert len(traces) == once > 0  # the second call traces and compiles nothing


def test_a_predict_with_a_collective_is_built_inside():
  summed = lambda p, x: jax.lax.pmean(x @ p["head"]["kernel"], "d")
  params = {"head": {"kernel": np.ones((2, 3), np.float32)}}
  with pytest.raises(
    ValueError, match="an axis that is not bound here .* build the optimizer insi"
  ):
    optim.kfac_blocks(summed, params, _POINTS, axis_name="d")


def test_parameters_that_a_wrapper_flattens_have_no_names():
  predict, params = made(Field())
  with pytest.raises(ValueError, match="the parameters have no names, as one array .optax.flatten"):
    optax.flatten(optim.kfac(0.1, predict, params, _POINTS, likelihood="normal")).init(params)


def test_a_layer_that_is_used_with_and_without_its_bias_is_refused():
  x = np.ones((4, 3), np.float32)
  params = {"one": nn.Dense(3).init(_KEY, x)["params"]}
  layers = [nn.Dense(3), nn.Dense(3, use_bias=False)]
  both = lambda params, x: sum(layer.apply({"params": params["one"]}, x) for layer in layers)
  with pytest.raises(ValueError, match="calls of the layer of one/kernel, one/bias take different"):
    optim.kfac_blocks(both, params, x)
  assert {b.kind for b in optim.kfac_blocks(both, params, x, plain="one")} == {"gradient"}


@pytest.mark.parametrize("inputs, outputs", [(0, 2), (2, 0)])
def test_a_layer_without_elements_is_refused_or_plain(inputs, outputs):
  class Empty(nn.Module):
    @nn.compact
    def __call__(self, x):
      other = nn.Dense(outputs, kernel_init=nn.initializers.zeros, name="empty")(x[:, :inputs])
      return jnp.concatenate([nn.Dense(2, name="full")(x), other], axis=-1)

  predict, params = made(Empty())
  with pytest.raises(
    ValueError,
    match=r"empty/(kernel|bias) has shape \(.*0.*\), no elements; list empty/kernel, empty/bias in",
  ):
    factors(predict, params)
  assert factors(predict, params, plain="^empty/").keys() == {"full"}
