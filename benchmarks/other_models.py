"""K-FAC on models of packages that know nothing of it: layers found, and ten steps.

For each model the table has the parameters' arrays, the layers that were found, the share of all
parameters in them, the largest relative difference between the gradient of a layer as its rows
give it (sum a g^T) and autodiff's, and the loss before and after ten steps of `optim.kfac`
with its defaults and a rate that the model has. The parameters without a layer follow with their reasons.

Models of packages that are not installed are skipped, with a line each. They are small, and their
data are random: the steps show that the optimizer runs and descends, not how well it trains.
"""

import functools
import importlib
import traceback
from typing import Any, Callable, NamedTuple

from flax import nnx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import tables
from mixer_jax import optim
from mixer_jax.optim.trees import by_path

STEPS = 10


class Case(NamedTuple):
  """A model with data."""

  predict: Callable  # maps (params, batch) to outputs and targets
  params: Any  # the parameters
  batch: Any  # the data
  likelihood: Any = "categorical"  # as for `optim.Curvature`
  learning_rate: float = 0.05  # of the ten steps
  options: dict[str, Any] = {}  # others of `optim.Curvature`


class Result(NamedTuple):
  """What is measured."""

  curvature: optim.Curvature  # the curvature, whose table is printed
  # the largest relative error of a layer's gradient from its rows; None without layers
  error: float | None
  losses: list[float]  # before each step, and after the last

  def covered(self, params: Any) -> float:
    """The share of all parameters that are in layers, in percent."""
    rest = sum(np.prod(b.shapes[0]) for b in self.curvature.blocks if b.kind == "gradient")
    return 100 * (1 - rest / sum(x.size for x in jax.tree.leaves(params)))


def images(key: int, shape: tuple[int, ...], classes: int = 5) -> dict[str, np.ndarray]:
  """Random arrays and their classes, by a random projection, so that there is something to learn."""
  rng = np.random.default_rng(key)
  x = rng.normal(size=shape).astype(np.float32)
  projection = rng.normal(size=(int(np.prod(shape[1:])), classes))
  return {"x": x, "y": (x.reshape(len(x), -1) @ projection).argmax(-1).astype(np.int32)}


def tokens(shape: tuple[int, ...], words: int) -> dict[str, np.ndarray]:
  """Sequences in which a word follows the one before by 1 or 2."""
  rng = np.random.default_rng(0)
  steps = rng.integers(1, 3, shape).cumsum(axis=1) + rng.integers(0, words, (shape[0], 1))
  return {
    "x": (steps[:, :-1] % words).astype(np.int32),
    "y": (steps[:, 1:] % words).astype(np.int32),
  }


def twisted(count: int, dim: int) -> np.ndarray:
  """Points whose density a flow shall learn."""
  rng = np.random.default_rng(0)
  x = rng.normal(size=(count, dim))
  x[:, 1:] = 0.4 * x[:, 1:] + np.sin(2 * x[:, :-1])
  return x.astype(np.float32)


def _no_sample(key: jax.Array, y: jax.Array) -> jax.Array:
  return jnp.zeros(y.shape)


# The outputs are log-densities [batch, 1], and the loss is minus their mean: an empirical Fisher matrix.
DENSITY = optim.Likelihood(sample=_no_sample, gradient=lambda y, _: -jnp.ones_like(y))
OF_DENSITY = dict(likelihood=DENSITY, options={"estimation": "empirical"})


def of_equinox(model: Any, call: Callable, batch: Any, **rest: Any) -> Case:
  """A case of an Equinox module; `call` maps it and one example to outputs."""
  import equinox as eqx

  params, static = eqx.partition(model, eqx.is_inexact_array)

  def predict(params, batch):
    model = eqx.combine(params, static)
    return jax.vmap(lambda x: call(model, x))(batch["x"]), batch["y"]

  return Case(predict, params, batch, **rest)


def of_linen(module: nn.Module, batch: Any, **rest: Any) -> Case:
  variables = jax.jit(module.init)(jax.random.key(0), batch["x"])
  other = {k: v for k, v in variables.items() if k != "params"}
  apply = lambda p, x: module.apply({"params": p, **other}, x)
  return Case(lambda p, b: (apply(p, b["x"]), b["y"]), variables["params"], batch, **rest)


def of_nnx(module: Any, batch: Any, **rest: Any) -> Case:
  graph, state, other = nnx.split(module, nnx.Param, ...)
  apply = lambda p, x: nnx.merge(graph, p, other, copy=True)(x)
  return Case(lambda p, b: (apply(p, b["x"]), b["y"]), state, batch, **rest)


def of_haiku(function: Callable, batch: Any, **rest: Any) -> Case:
  import haiku as hk

  net = hk.without_apply_rng(hk.transform_with_state(function))
  params, state = jax.jit(net.init)(jax.random.key(0), batch["x"])
  apply = lambda p, x: net.apply(p, state, x)[0]
  return Case(lambda p, b: (apply(p, b["x"]), b["y"]), params, batch, **rest)


# equimo: an Equinox zoo of vision models.


def equimo_vit() -> Case:
  from equimo.models import VisionTransformer

  model = VisionTransformer(
    16, 3, 24, 4, num_heads=[2], depths=[2], num_classes=5, key=jax.random.key(0)
  )
  batch = images(0, (16, 3, 16, 16))
  return of_equinox(model, lambda m, x: m(x, jax.random.key(0), inference=True), batch)


def equimo_mlla() -> Case:
  from equimo.models import Mlla

  sizes = dict(dim=16, patch_size=4, depths=[1, 1], num_heads=[2, 4], num_classes=5)
  # Version 1.1.0 drops what its attention returns: the parameters in it are not read.
  model = Mlla(32, 3, **sizes, key=jax.random.key(0))
  call = lambda m, x: m(x, jax.random.key(0), inference=True)
  return of_equinox(model, call, images(0, (8, 3, 32, 32)))


def equimo_convnext() -> Case:
  from equimo.models import ConvNeXt

  model = ConvNeXt(
    3, depths=[1, 1, 1, 1], dims=[8, 8, 16, 16], num_classes=5, key=jax.random.key(0)
  )
  call = lambda m, x: m(x, jax.random.key(0), inference=True)
  return of_equinox(model, call, images(0, (8, 3, 32, 32)))


# flowjax: normalizing flows in Equinox.


def _flow(make: Callable) -> Case:
  import equinox as eqx
  from flowjax.distributions import Normal
  import paramax

  flow = make(jax.random.key(0), base_dist=Normal(jnp.zeros(3)))
  params, static = eqx.partition(
    flow, eqx.is_inexact_array, is_leaf=lambda x: isinstance(x, paramax.NonTrainable)
  )

  def predict(params, batch):
    flow = paramax.unwrap(eqx.combine(params, static))
    return jax.vmap(flow.log_prob)(batch)[:, None], jnp.zeros((len(batch), 1))

  return Case(predict, params, twisted(64, 3), learning_rate=0.1, **OF_DENSITY)


def flowjax_coupling() -> Case:
  from flowjax.flows import coupling_flow

  return _flow(functools.partial(coupling_flow, flow_layers=3, nn_width=12))


def flowjax_autoregressive() -> Case:
  from flowjax.flows import masked_autoregressive_flow

  return _flow(functools.partial(masked_autoregressive_flow, flow_layers=3, nn_width=12))


def flowjax_block_neural() -> Case:
  from flowjax.flows import block_neural_autoregressive_flow

  return _flow(functools.partial(block_neural_autoregressive_flow, nn_block_dim=4))


# brax: policies and values of PPO, in Linen.


def brax_ppo() -> Case:
  from brax.training.agents.ppo import networks

  net = networks.make_ppo_networks(
    11, 3, policy_hidden_layer_sizes=(16, 16), value_hidden_layer_sizes=(16, 16)
  )
  keys = jax.random.split(jax.random.key(0))
  params = {"policy": net.policy_network.init(keys[0]), "value": net.value_network.init(keys[1])}
  rng = np.random.default_rng(0)
  batch = {"x": rng.normal(size=(64, 11)).astype(np.float32)}
  batch |= {"action": np.tanh(batch["x"][:, :3]), "return": batch["x"].sum(1, keepdims=True) / 3}

  def predict(params, batch):
    mean, spread = jnp.split(net.policy_network.apply(None, params["policy"], batch["x"]), 2, -1)
    value = net.value_network.apply(None, params["value"], batch["x"])[:, None]
    outputs = {"policy": (mean, jax.nn.softplus(spread) + 0.1), "value": value}
    return outputs, {"policy": batch["action"], "value": batch["return"]}

  likelihood = {"policy": "normal_variance", "value": "normal"}
  return Case(predict, params, batch, likelihood)


def brax_critic() -> Case:
  """Two values of an observation and an action, as SAC has them."""
  from brax.training import networks

  net = networks.make_q_network(8, 3, hidden_layer_sizes=(16, 16), layer_norm=True)
  rng = np.random.default_rng(0)
  x = rng.normal(size=(64, 11)).astype(np.float32)
  batch = {"x": x, "y": np.repeat(np.tanh(x.sum(1, keepdims=True)), 2, 1)}
  apply = lambda p, b: net.apply(None, p, b["x"][:, :8], b["x"][:, 8:])
  predict = lambda p, b: (apply(p, b), b["y"])
  return Case(predict, net.init(jax.random.key(0)), batch, "normal")


# Language models.


def penzai_gemma() -> Case:
  """The Gemma of penzai, of named axes; two layers, one head of keys and values."""
  from penzai import pz
  from penzai.models.transformer.variants import llamalike_common as common

  config = common.LlamalikeTransformerConfig(
    num_kv_heads=1,
    query_head_multiplier=2,
    embedding_dim=16,
    projection_dim=8,
    mlp_hidden_dim=24,
    num_decoder_blocks=2,
    vocab_size=12,
    mlp_variant="geglu_approx",
    tie_embedder_and_logits=True,
  )
  model = common.build_llamalike_transformer(config, init_base_rng=jax.random.key(0))
  bare, variables = pz.unbind_params(model, freeze=True)

  def predict(params, batch):
    net = pz.bind_variables(bare, params)
    ids = pz.nx.wrap(batch["x"]).tag("batch", "seq")
    places = pz.nx.wrap(jnp.broadcast_to(jnp.arange(batch["x"].shape[1]), batch["x"].shape))
    logits = net(ids, token_positions=places.tag("batch", "seq"))
    return logits.unwrap("batch", "seq", "vocabulary"), batch["y"]

  return Case(predict, variables, tokens((16, 9), 12))


def gemma_3() -> Case:
  """The Gemma of Google DeepMind's package, with two layers of local and global attention."""
  from gemma.gm.nn import _config, _modules, _transformer

  kinds = _modules.AttentionType
  config = _config.TransformerConfig(
    num_embed=12,
    embed_dim=16,
    hidden_dim=24,
    num_heads=2,
    head_dim=8,
    num_kv_heads=1,
    final_logit_softcap=None,
    use_post_attn_norm=True,
    use_post_ffw_norm=True,
    attention_types=(kinds.LOCAL_SLIDING, kinds.GLOBAL),
    sliding_window_size=4,
    use_qk_norm=True,
  )
  net = _transformer.Transformer(config=config, dtype=jnp.float32)
  batch = tokens((16, 9), 12)
  params = jax.jit(net.init)(jax.random.key(0), batch["x"])["params"]
  predict = lambda p, b: (net.apply({"params": p}, b["x"]).logits, b["y"])
  return Case(predict, params, batch)


# Graphs and molecules.


def _graphs(count: int, nodes: int, edges: int) -> dict[str, np.ndarray]:
  rng = np.random.default_rng(0)
  ends = rng.integers(0, nodes, (2, count, edges))
  x = rng.normal(size=(count, nodes, 4)).astype(np.float32)
  return {
    "x": x,
    "senders": ends[0],
    "receivers": ends[1],
    "y": (x.sum((1, 2)) > 0).astype(np.int32),
  }


def jraph_network() -> Case:
  """A graph network of MLPs for edges, nodes and the whole, each example a graph."""
  import haiku as hk
  import jraph

  batch = _graphs(32, 6, 10)

  def net(x, senders, receivers):
    graph = jraph.GraphsTuple(
      nodes=x,
      edges=jnp.ones((len(senders), 1)),
      senders=senders,
      receivers=receivers,
      globals=jnp.zeros((1, 1)),
      n_node=jnp.array([len(x)]),
      n_edge=jnp.array([len(senders)]),
    )
    mlp = lambda name, n: jraph.concatenated_args(lambda x: hk.nets.MLP([8, n], name=name)(x))
    layer = lambda i, n: jraph.GraphNetwork(
      mlp(f"edge{i}", 6), mlp(f"node{i}", 6), mlp(f"all{i}", n)
    )
    return layer(1, 2)(layer(0, 5)(graph)).globals[0]

  return _of_graphs(net, batch)


def jraph_convolution() -> Case:
  """Two graph convolutions and a graph attention, each example a graph."""
  import haiku as hk
  import jraph

  def net(x, senders, receivers):
    graph = jraph.GraphsTuple(
      x, None, receivers, senders, None, jnp.array([len(x)]), jnp.array([len(senders)])
    )
    layer = lambda n: jraph.GraphConvolution(
      lambda x: jax.nn.relu(hk.Linear(n)(x)), add_self_edges=True
    )
    attention = jraph.GAT(
      hk.Linear(6), lambda s, r, e: hk.Linear(1)(jnp.concatenate([s, r], -1)), jnp.tanh
    )
    return hk.Linear(2)(attention(layer(8)(layer(8)(graph))).nodes.mean(0))

  return _of_graphs(net, _graphs(32, 6, 10))


def _of_graphs(function: Callable, batch: Any) -> Case:
  import haiku as hk

  net = hk.without_apply_rng(hk.transform(function))
  parts = lambda b: (b["x"], b["senders"], b["receivers"])
  params = net.init(jax.random.key(0), *(x[0] for x in parts(batch)))
  apply = lambda p, b: jax.vmap(lambda *one: net.apply(p, *one))(*parts(b))
  return Case(lambda p, b: (apply(p, b), b["y"]), params, batch)


def e3nn_points() -> Case:
  """An equivariant net of points: tensor products of features and directions, by distances."""
  import e3nn_jax as e3nn
  import e3nn_jax.flax as layers

  class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
      return jax.vmap(self.one)(x) if not self.is_initializing() else self.one(x[0])[None]

    def one(self, x):
      pairs = x[:, None] - x[None]
      distance = jnp.sqrt((pairs**2).sum(-1, keepdims=True) + 0.1)
      directions = e3nn.spherical_harmonics("0e + 1o", e3nn.IrrepsArray("1o", pairs), True)
      h = e3nn.IrrepsArray("4x0e", jnp.ones((len(x), 4)))
      for _ in range(2):
        h = layers.Linear("4x0e + 4x1o")(h)
        h = e3nn.tensor_product(h[None], directions, filter_ir_out=["0e", "1o"])
        mix = layers.MultiLayerPerceptron(
          (8, h.irreps.num_irreps), jax.nn.silu, output_activation=False
        )
        h = e3nn.mean(h * mix(distance), axis=1)
        h = layers.Linear("6x0e + 4x1o")(h)
        h = e3nn.scalar_activation(h, [jax.nn.silu, None])
      return layers.Linear("2x0e")(h).array.mean(0)

  rng = np.random.default_rng(0)
  x = rng.normal(size=(32, 5, 3)).astype(np.float32)
  spread = np.square(x).sum((1, 2))
  return of_linen(Net(), {"x": x, "y": (spread > np.median(spread)).astype(np.int32)})


# The layers of Flax, Linen and NNX, and nets of Haiku and distrax.


def linen_attention() -> Case:
  class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = x + nn.MultiHeadDotProductAttention(2, normalize_qk=True)(nn.LayerNorm()(x))
      x = x + nn.SelfAttention(2)(nn.RMSNorm()(x), mask=nn.make_causal_mask(x[..., 0]))
      x = nn.WeightNorm(nn.Dense(12))(x)
      return nn.DenseGeneral(5)(x.mean(1))

  return of_linen(Net(), images(0, (32, 6, 8)))


def linen_recurrent() -> Case:
  class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
      both = nn.Bidirectional(nn.RNN(nn.LSTMCell(6)), nn.RNN(nn.OptimizedLSTMCell(6)))(x)
      x = nn.RNN(nn.MGUCell(6))(nn.RNN(nn.GRUCell(6))(both))
      return nn.Dense(5)(x[:, -1])

  return of_linen(Net(), images(0, (32, 6, 8)))


def linen_convolutional_lstm() -> Case:
  class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = nn.RNN(nn.ConvLSTMCell(4, (3, 3)))(x)[:, -1]
      return nn.Dense(5)(x.reshape(len(x), -1))

  return of_linen(Net(), images(0, (16, 3, 5, 5, 2)))


def nnx_attention() -> Case:
  class Net(nnx.Module):
    def __init__(self, rngs):
      self.norm = nnx.LayerNorm(8, rngs=rngs)
      self.attention = nnx.MultiHeadAttention(2, 8, decode=False, normalize_qk=True, rngs=rngs)
      self.lora = nnx.LoRALinear(8, 8, lora_rank=2, rngs=rngs)
      self.mixed = nnx.Einsum("btd,dhe->bthe", (8, 2, 4), (2, 4), rngs=rngs)
      self.head = nnx.LinearGeneral((2, 4), 5, axis=(-2, -1), rngs=rngs)

    def __call__(self, x):
      x = x + self.attention(self.norm(x))
      return self.head(nnx.gelu(self.mixed(x + self.lora(x))).mean(1))

  return of_nnx(Net(nnx.Rngs(0)), images(0, (32, 6, 8)))


def nnx_recurrent() -> Case:
  class Net(nnx.Module):
    def __init__(self, rngs):
      cells = nnx.LSTMCell(8, 6, rngs=rngs), nnx.OptimizedLSTMCell(8, 6, rngs=rngs)
      self.both = nnx.Bidirectional(*(nnx.RNN(c, rngs=rngs) for c in cells), rngs=rngs)
      self.last = nnx.RNN(nnx.GRUCell(12, 6, rngs=rngs), rngs=rngs)
      self.head = nnx.Linear(6, 5, rngs=rngs)

    def __call__(self, x):
      return self.head(self.last(self.both(x))[:, -1])

  return of_nnx(Net(nnx.Rngs(0)), images(0, (32, 6, 8)))


def haiku_resnet() -> Case:
  """The ResNet-18 of Haiku, whose batch statistics mix the examples."""
  import haiku as hk

  def net(x):
    config = dict(blocks_per_group=(1, 1, 1, 1), channels_per_group=(8, 8, 16, 16))
    return hk.nets.ResNet(**config, num_classes=5, bottleneck=False)(x, is_training=True)

  return of_haiku(net, images(0, (16, 16, 16, 3)), options={"in_axes": None})


def haiku_recurrent() -> Case:
  import haiku as hk

  def net(x):
    core = hk.DeepRNN([hk.LSTM(6), hk.GRU(6), hk.VanillaRNN(6)])
    y, _ = hk.dynamic_unroll(core, x, core.initial_state(len(x)), time_major=False)
    return hk.Linear(5)(hk.LayerNorm(-1, True, True)(y[:, -1]))

  return of_haiku(net, images(0, (32, 6, 8)))


def distrax_flow() -> Case:
  """Masked couplings of splines, by the MLPs of Haiku."""
  import distrax
  import haiku as hk

  bins = 4

  def log_prob(x):
    layers = []
    for i in range(2):
      conditioner = hk.Sequential(
        [hk.nets.MLP([12], activate_final=True), hk.Linear(3 * (3 * bins + 1)), hk.Reshape((3, -1))]
      )
      spline = lambda p: distrax.RationalQuadraticSpline(p, -4.0, 4.0)
      layers.append(distrax.MaskedCoupling(jnp.arange(3) % 2 == i, conditioner, spline))
    base = distrax.MultivariateNormalDiag(jnp.zeros(3), jnp.ones(3))
    flow = distrax.Transformed(base, distrax.Inverse(distrax.Chain(layers)))
    return flow.log_prob(x)[:, None]

  x = twisted(64, 3)
  return of_haiku(log_prob, {"x": x, "y": np.zeros((64, 1), np.float32)}, **OF_DENSITY)


CASES = {
  "equimo": [equimo_vit, equimo_mlla, equimo_convnext],
  "flowjax": [flowjax_coupling, flowjax_autoregressive, flowjax_block_neural],
  "brax": [brax_ppo, brax_critic],
  "penzai": [penzai_gemma],
  "gemma": [gemma_3],
  "jraph": [jraph_network, jraph_convolution],
  "e3nn_jax": [e3nn_points],
  "flax": [
    linen_attention,
    linen_recurrent,
    linen_convolutional_lstm,
    nnx_attention,
    nnx_recurrent,
  ],
  "haiku": [haiku_resnet, haiku_recurrent],
  "distrax": [distrax_flow],
}


def measure(case: Case) -> Result:
  """Finds the layers, compares gradients and takes the steps."""
  options = {"likelihood": case.likelihood} | case.options
  curvature = optim.Curvature(case.predict, case.params, case.batch, **options)
  return Result(curvature, _error(case, curvature), _descent(case, curvature))


def _error(case: Case, curvature: optim.Curvature) -> float | None:
  """The largest relative error of a layer's gradient from its rows, of random sums of outputs."""
  outputs = curvature.outputs(case.params, case.batch)
  leaves, structure = jax.tree.flatten(outputs)
  rng = np.random.default_rng(0)
  drawn = structure.unflatten([jnp.float32(rng.normal(size=y.shape)) for y in leaves])

  def total(params):
    products = jax.tree.map(jnp.vdot, curvature.outputs(params, case.batch), drawn)
    return sum(jax.tree.leaves(products))

  with jax.default_matmul_precision("highest"):
    leaves = by_path(jax.jit(jax.grad(total))(case.params))
    own = [block for block in curvature.blocks if block.kind == "kronecker"]
    exact = {b.name: b.matrix([leaves[path] for path in b.paths]) for b in own}
    found = jax.jit(lambda p, b: curvature.row_gradients(p, b, lambda _: drawn))(
      case.params, case.batch
    )
  norm = np.linalg.norm
  errors = [norm(found[n] - exact[n]) / max(norm(exact[n]), 1e-12) for n in exact]
  return float(np.max(errors)) if errors else None


def _descent(case: Case, curvature: optim.Curvature) -> list[float]:
  """The loss before each step of K-FAC and after the last."""
  tx = optim.kfac(case.learning_rate, curvature, weight_decay=0.0)

  def loss(params):
    outputs, targets = case.predict(params, case.batch)
    return _loss(case.likelihood, outputs, targets)

  @jax.jit
  def step(params, state, key):
    value, grads = jax.value_and_grad(loss)(params)
    updates, state = tx.update(grads, state, params, batch=case.batch, rng=key)
    return optax.apply_updates(params, updates), state, value

  params, state, losses = case.params, tx.init(case.params), []
  for i in range(STEPS):
    params, state, value = step(params, state, jax.random.key(i))
    losses.append(float(value))
  return [*losses, float(jax.jit(loss)(params))]


def _loss(likelihood: Any, outputs: Any, targets: Any) -> jax.Array:
  """Minus the mean log-likelihood, without constants."""
  if isinstance(likelihood, dict):
    return sum(_loss(own, outputs[k], targets[k]) for k, own in likelihood.items())
  if likelihood is DENSITY:
    return -outputs.mean()
  if likelihood == "categorical":
    return optax.softmax_cross_entropy_with_integer_labels(outputs, targets).mean()
  if likelihood == "normal_variance":
    mean, variance = outputs
    terms = jnp.square(targets - mean) / (2 * variance) + jnp.log(variance) / 2
    return terms.sum(-1).mean()
  return jnp.square(outputs - targets).sum(-1).mean()


def main(_: Any = None) -> None:
  """Prints the table, and below it what each model has left over."""
  titles = "package model arrays layers covered[%] error loss after"
  left: dict[str, list[optim.Block]] = {}

  def rows():
    for package, makers in CASES.items():
      try:
        importlib.import_module(package)
      except ImportError:
        print(f"| {package} | not installed |", flush=True)
        continue
      for make in makers:
        yield from _row(package, make, left)

  tables.show(titles.split(), rows(), texts=2)
  for name, blocks in left.items():
    print(f"\n{name}:")
    for block in blocks:
      print(f"  {block.name}: {block.reason}")


def _row(package: str, make: Callable, left: dict[str, Any]) -> Any:
  try:
    case = make()
    found = measure(case)
  except Exception:  # the other models are measured all the same
    print(f"| {package} | {make.__name__} | failed |", flush=True)
    traceback.print_exc()
    return
  blocks = found.curvature.blocks
  left[make.__name__] = [b for b in blocks if b.kind == "gradient"]
  numbers = len(jax.tree.leaves(case.params)), sum(b.kind == "kronecker" for b in blocks)
  losses = f"{found.losses[0]:.3f}", f"{found.losses[-1]:.3f}"
  share = f"{found.covered(case.params):.1f}"
  yield (
    package,
    make.__name__,
    *map(str, numbers),
    share,
    tables.number(found.error, ".0e"),
    *losses,
  )
