"""ResMLP against the paper's sizes and costs, the released initial values and NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import erf

from mixer_jax.models import resmlp

# Millions of parameters, billions of multiply-adds at 224x224 with 1,000 classes:
# Tables 3 and D.3 of the ResMLP paper.
PAPER = [
  ("resmlp_s12", {}, 15.4, 3.0),
  ("resmlp_s24", {}, 30.0, 6.0),
  ("resmlp_s36", {}, 44.7, 8.9),
  ("resmlp_b24", {}, 115.7, 23.0),
  ("resmlp_s12_14", {}, 15.6, 4.0),
  ("resmlp_s12_8", {}, 22.1, 14.0),
  ("resmlp_b24_8", {}, 129.1, 100.2),
  ("resmlp_s12", dict(normalization="layer_norm"), 15.4, 3.0),
  ("resmlp_s12", dict(pooling="class_mlp"), 17.7, 3.0),
  ("resmlp_s24", dict(pooling="class_mlp"), 32.4, 6.0),
  ("resmlp_s36", dict(pooling="class_mlp"), 47.1, 8.9),
  ("resmlp_s12", dict(patch_communication="none"), 14.9, 2.8),
  ("resmlp_s12", dict(patch_communication="mlp"), 18.6, 4.3),
  ("resmlp_s12", dict(patch_communication="conv3x3"), 30.8, 6.0),
  ("resmlp_s12", dict(patch_communication="depthwise"), 14.9, 2.8),
  ("resmlp_s12", dict(patch_communication="separable"), 16.7, 3.2),
]


def build(name, classes=1000, **overrides):
  return resmlp.FAMILY.variants[name](num_classes=classes, **overrides)


def shapes(model, height=224, width=224):
  return jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, height, width, 3)))["params"]


def named(params):
  return {
    "/".join(k.key for k in path): x for path, x in jax.tree_util.tree_leaves_with_path(params)
  }


def multiply_adds(model, params):
  """A kernel acts once a token, or once a channel where it mixes tokens."""
  tokens, total = (224 // model.patch_size) ** 2, 0
  for name, x in named(params).items():
    if not name.endswith("kernel"):
      continue
    # Kernels of scanned blocks have an axis over the blocks in front.
    dimensions = len(x.shape) - name.startswith("ResMlpBlocks/")
    mixes_tokens = "cross_patch/" in name and dimensions == 2
    once_an_image = name.startswith(("head", "ClassMlpBlock"))
    uses = model.hidden_dim if mixes_tokens else 1 if once_an_image else tokens
    total += uses * x.size
  return total


@pytest.mark.parametrize("name, overrides, millions, billions", PAPER)
@pytest.mark.first(5)
def test_sizes_and_costs_are_those_of_the_paper(name, overrides, millions, billions):
  model = build(name, scan_blocks=True, **overrides)
  params = shapes(model)
  assert round(sum(x.size for x in jax.tree.leaves(params)) / 1e6, 1) == millions
  cost = multiply_adds(model, params)
  if overrides == dict(patch_communication="mlp"):
    # 0.001 less than would round to the printed 4.3; no other figure leaves room
    # for counting biases or activations, which would close the gap.
    assert cost == 4_248_886_272 and billions == 4.3
  else:
    assert round(cost / 1e9, 1) == billions


def test_parameter_tree():
  block = {
    "norm1/scale": (384,),
    "norm1/bias": (384,),
    "cross_patch/kernel": (196, 196),
    "cross_patch/bias": (196,),
    "layer_scale_1/scale": (384,),
    "norm2/scale": (384,),
    "norm2/bias": (384,),
    "cross_channel/Dense_0/kernel": (384, 1536),
    "cross_channel/Dense_0/bias": (1536,),
    "cross_channel/Dense_1/kernel": (1536, 384),
    "cross_channel/Dense_1/bias": (384,),
    "layer_scale_2/scale": (384,),
  }
  expected = {f"ResMlpBlock_{i}/{k}": s for i in range(12) for k, s in block.items()} | {
    "stem/kernel": (16, 16, 3, 384),
    "stem/bias": (384,),
    "norm/scale": (384,),
    "norm/bias": (384,),
    "head/kernel": (384, 7),
    "head/bias": (7,),
  }
  assert {k: x.shape for k, x in named(shapes(build("resmlp_s12", 7))).items()} == expected


def small(**overrides):
  fields = dict(
    patch_size=4, hidden_dim=12, num_blocks=2, channels_mlp_dim=48, layer_scale_init=0.1
  )
  return resmlp.ResMlp(num_classes=5, **fields | overrides)


@pytest.mark.thorough
def test_first_values():
  model = small(num_blocks=1, pooling="class_mlp", layer_scale_init=0.01)
  params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 8, 8, 3)))["params"]
  for block in ("ResMlpBlock_0", "ClassMlpBlock_0", "ClassMlpBlock_1"):
    for i in "12":
      np.testing.assert_array_equal(params[block][f"layer_scale_{i}"]["scale"], np.float32(0.01))
      np.testing.assert_array_equal(params[block][f"norm{i}"]["scale"], 1.0)
      np.testing.assert_array_equal(params[block][f"norm{i}"]["bias"], 0.0)
  wide = small(num_blocks=1, hidden_dim=800)
  head = jax.jit(wide.init)(jax.random.key(0), jnp.zeros((1, 8, 8, 3)))["params"]["head"]
  assert abs(head["kernel"].std() / 0.02 - 1) < 0.1 and not head["bias"].any()


def randomised(model, images, seed=1):
  """Parameters of the model's tree, all non-trivial, that keep the tokens' size."""
  rng = np.random.default_rng(seed)

  def leaf(path, x):
    if path[-1].key == "kernel":
      return rng.normal(0.0, (x.size / x.shape[-1]) ** -0.5, x.shape).astype(np.float32)
    return rng.normal(0.3, 0.5, x.shape).astype(np.float32)

  return jax.tree_util.tree_map_with_path(leaf, shapes(model, *images.shape[1:3]))


def numpy_resmlp(model, params, images):
  """Section 2, Appendices A and C of the paper, in float64; returns logits and tokens."""

  def norm(x, q):
    if model.normalization == "layer_norm":
      x = x - x.mean(-1, keepdims=True)
      x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    return x * q["scale"] + q["bias"]

  def dense(x, q):
    return x @ q["kernel"] + q["bias"]

  def mlp(x, q):
    x = dense(x, q["Dense_0"])
    return dense(x * (1 + erf(x / np.sqrt(2))) / 2, q["Dense_1"])

  def conv(x, q):
    x = x.reshape(batch, rows, columns, -1)
    padded, y = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0))), q["bias"]
    for i in range(3):
      for j in range(3):
        window, k = padded[:, i : i + rows, j : j + columns], q["kernel"][i, j]
        y = y + (window @ k if model.patch_communication == "conv3x3" else window * k[0])
    return y.reshape(batch, rows * columns, -1)

  def communicate(x, block):
    q = block["cross_patch"]
    if model.patch_communication in ("linear", "mlp"):
      layer = dense if model.patch_communication == "linear" else mlp
      return layer(x.swapaxes(1, 2), q).swapaxes(1, 2)
    x = conv(x, q)
    return (
      dense(x, block["cross_patch_pointwise"]) if model.patch_communication == "separable" else x
    )

  def channels(x, q):
    return x + q["layer_scale_2"]["scale"] * mlp(norm(x, q["norm2"]), q["cross_channel"])

  p = jax.tree.map(np.float64, params)
  batch, patch = len(images), model.patch_size
  rows, columns = images.shape[1] // patch, images.shape[2] // patch
  x = images.reshape(batch, rows, patch, columns, patch, 3).swapaxes(2, 3)
  x = x.reshape(batch, rows * columns, -1) @ p["stem"]["kernel"].reshape(patch * patch * 3, -1)
  x = x + p["stem"]["bias"]
  for i in range(model.num_blocks):
    q = p[f"ResMlpBlock_{i}"]
    if model.patch_communication != "none":
      x = x + q["layer_scale_1"]["scale"] * communicate(norm(x, q["norm1"]), q)
    x = channels(x, q)
  pooled = x
  if model.pooling == "class_mlp":
    pooled = np.tile(p["class_token"]["embedding"], (batch, 1, 1))
    for i in range(2):
      q = p[f"ClassMlpBlock_{i}"]
      y = norm(np.concatenate([pooled, x], axis=1), q["norm1"])
      y = dense(y.swapaxes(1, 2), q["cross_patch"]).swapaxes(1, 2)
      pooled = channels(pooled + q["layer_scale_1"]["scale"] * y, q)
  return dense(norm(pooled, p["norm"]).mean(1), p["head"]), x


ABLATIONS = [
  {},
  dict(normalization="layer_norm"),
  dict(pooling="class_mlp"),
  *(dict(patch_communication=kind) for kind in resmlp.COMMUNICATIONS[1:]),
  dict(pooling="class_mlp", normalization="layer_norm", patch_communication="separable"),
]


@pytest.mark.parametrize("overrides", ABLATIONS, ids=str)
@pytest.mark.first(2)
def test_forward_equals_numpy(overrides):
  images = np.random.default_rng(0).normal(size=(3, 8, 12, 3))
  model = small(**overrides)
  params = randomised(model, images)
  logits, state = jax.jit(model.apply, static_argnames="mutable")(
    {"params": params}, images, mutable="intermediates"
  )
  expected, tokens = numpy_resmlp(model, params, images)
  np.testing.assert_allclose(logits, expected, rtol=2e-5, atol=2e-5)
  np.testing.assert_allclose(state["intermediates"]["tokens"][0], tokens, rtol=2e-5, atol=2e-5)


@pytest.mark.thorough
def test_tanh_gelu_is_another():
  images = np.random.default_rng(0).normal(size=(3, 8, 12, 3))
  params = {"params": randomised(small(), images)}
  exact, tanh = (jax.jit(small(gelu=g).apply)(params, images) for g in ("exact", "tanh"))
  assert 1e-5 < np.abs(exact - tanh).max() < 1e-2


# The layers of these are in the last one.
COVERED = [
  dict(normalization="layer_norm"),
  dict(pooling="class_mlp"),
  dict(patch_communication="none"),
  dict(patch_communication="depthwise"),
]
LEARNT = [pytest.param(x, marks=pytest.mark.slow if x in COVERED else ()) for x in ABLATIONS]


@pytest.mark.parametrize("overrides", LEARNT, ids=str)
@pytest.mark.first(2)
def test_every_parameter_learns(overrides):
  images = np.random.default_rng(0).normal(size=(3, 8, 12, 3)).astype(np.float32)
  model = small(num_blocks=1, **overrides)

  def loss(params):
    return (model.apply({"params": params}, images, train=True) ** 2).mean()

  grads = named(jax.jit(jax.grad(loss))(randomised(model, images)))
  assert all(np.isfinite(g).all() and np.any(g) for g in grads.values())


@pytest.mark.parametrize("overrides", [{}, dict(pooling="class_mlp", normalization="layer_norm")])
@pytest.mark.first(1)
def test_bfloat16_computes_low_and_stores_high(overrides):
  images = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype(np.float32)
  params = randomised(small(**overrides), images)
  low = small(dtype="bfloat16", **overrides)
  logits, state = jax.jit(low.apply, static_argnames="mutable")(
    {"params": params}, images, mutable="intermediates"
  )
  assert state["intermediates"]["tokens"][0].dtype == jnp.bfloat16
  assert logits.dtype == jnp.float32
  assert {x.dtype for x in jax.tree.leaves(shapes(low, 8, 8))} == {jnp.dtype("float32")}
  exact = jax.jit(small(**overrides).apply)({"params": params}, images)
  np.testing.assert_allclose(logits, exact, rtol=0.1, atol=0.1)


def test_stochastic_depth_has_one_rate_and_keeps_the_mean():
  images = np.random.default_rng(0).normal(size=(200, 8, 8, 3)).astype(np.float32)
  model = small(stochastic_depth=0.5)
  params = randomised(model, images)
  branches = [
    (f"ResMlpBlock_{i}", layer) for i in range(2) for layer in ("layer_scale_1", "layer_scale_2")
  ]

  @functools.partial(jax.jit, static_argnames="train")
  def tokens(only, train):
    """The tokens of a net in which only one branch, if any, adds something."""
    own = jax.tree.map(lambda x: x, params)
    for branch in branches:
      own[branch[0]][branch[1]]["scale"] *= only == branches.index(branch)
    rngs = {"dropout": jax.random.key(0)}
    return model.apply({"params": own}, images, train=train, rngs=rngs, mutable="intermediates")[1][
      "intermediates"
    ]["tokens"][0]

  without = tokens(-1, False)
  for i in range(4):
    branch, trained = tokens(i, False) - without, tokens(i, True) - without
    dropped, doubled = (np.isclose(trained, a * branch, atol=1e-5).all((1, 2)) for a in (0, 2))
    assert (dropped ^ doubled).all()
    assert 70 <= dropped.sum() <= 130  # binomial(200, 1/2), four standard deviations


@pytest.mark.thorough
def test_dropout_acts_in_training_only():
  images = np.ones((2, 8, 8, 3), np.float32)
  model = small(num_blocks=1, dropout_rate=0.5, patch_communication="mlp")
  params = {"params": randomised(model, images)}
  train = functools.partial(model.apply, params, images, train=True)
  run = jax.jit(lambda key: train(rngs={"dropout": jax.random.key(key)}))
  assert not np.allclose(run(0), run(1))
  plain = small(num_blocks=1, patch_communication="mlp").apply(params, images)
  np.testing.assert_array_equal(model.apply(params, images), plain)
