"""ResMLP against the paper's sizes and costs, the released initial values and NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import erf

from mixer_jax.models import resmlp
from tests.models.common import count, flat, images_of, layer_norm, patches, run, tree_of

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
  return tree_of(model, jnp.zeros((1, height, width, 3)))


def multiply_adds(model, params):
  """A kernel acts once a token, or once a channel where it mixes tokens."""
  tokens, total = (224 // model.patch_size) ** 2, 0
  for name, x in flat(params).items():
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
  assert round(count(params) / 1e6, 1) == millions
  cost = multiply_adds(model, params)
  if overrides == dict(patch_communication="mlp"):
    # 0.001 less than would round to the printed 4.3; no other figure leaves room
    # for counting biases or activations, which would close the gap.
    assert cost == 4_248_886_272 and billions == 4.3
  else:
    assert round(cost / 1e9, 1) == billions


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
      return layer_norm(x, q, 1e-6)
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
  x = patches(images, patch, p["stem"])
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
  images, model = images_of(3, 8, 12), small(**overrides)
  params = randomised(model, images)
  logits, found = run(model, params, images)
  expected, tokens = numpy_resmlp(model, params, images)
  np.testing.assert_allclose(logits, expected, rtol=2e-5, atol=2e-5)
  np.testing.assert_allclose(found, tokens, rtol=2e-5, atol=2e-5)


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
  images, model = images_of(3, 8, 12), small(num_blocks=1, **overrides)

  def loss(params):
    return (model.apply({"params": params}, images, train=True) ** 2).mean()

  grads = flat(jax.jit(jax.grad(loss))(randomised(model, images)))
  assert all(np.isfinite(g).all() and np.any(g) for g in grads.values())


def test_stochastic_depth_has_one_rate_and_keeps_the_mean():
  images, model = images_of(200, 8, 8), small(stochastic_depth=0.5)
  params = randomised(model, images)
  branches = [(f"ResMlpBlock_{i}", f"layer_scale_{j}") for i in (0, 1) for j in (1, 2)]

  def tokens(only, key=None):
    """The tokens of a net in which only one branch, if any, adds something."""
    own = jax.tree.map(lambda x: x, params)
    for block, layer in branches:
      own[block][layer]["scale"] = own[block][layer]["scale"] * ((block, layer) == only)
    return run(model, own, images, key)[1]

  without = tokens(None)
  for branch in branches:
    alone, trained = tokens(branch) - without, tokens(branch, 0) - without
    dropped, doubled = (np.isclose(trained, a * alone, atol=1e-5).all((1, 2)) for a in (0, 2))
    assert (dropped ^ doubled).all()
    assert 70 <= dropped.sum() <= 130  # binomial(200, 1/2), four standard deviations
