"""gMLP, tMLP and aMLP against the paper's sizes, timm's counts and NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from mixer_jax.models import gmlp
from tests.models.common import count, images_of, layer_norm, patches, randomised, run, tree_of

# Millions of parameters at 224x224 with 1,000 classes: Table 1 of the paper.
PAPER_MILLIONS = {"gmlp_ti16": 5.9, "gmlp_s16": 19.5, "gmlp_b16": 73.4}
# The same, counted in timm 1.0 (gmlp_ti16_224, gmlp_s16_224, gmlp_b16_224).
TIMM_COUNTS = {"gmlp_ti16": 5_867_328, "gmlp_s16": 19_422_656, "gmlp_b16": 73_075_392}
EPSILONS = dict(layer_norm_epsilon=0.05, gate_epsilon=0.2)  # large enough to be seen
SHAPES = [dict(gating=g) for g in gmlp.GATINGS] + [
  dict(spatial="toeplitz"),
  dict(attention_dim=5),
  dict(gating="additive", spatial="toeplitz", attention_dim=5),
]


def build(name, num_classes=5, **overrides):
  return gmlp.FAMILY.variants[name](num_classes=num_classes, **overrides)


def small(**overrides):
  return build("gmlp_small", **dict(hidden_dim=12, num_blocks=2, ffn_dim=20) | overrides)


def block(**overrides):
  return gmlp.GmlpBlock(**dict(ffn_dim=8, max_tokens=9) | overrides)


def tree(model):
  return tree_of(model, jnp.zeros((1, 224, 224, 3)))


def numpy_block(p, x, gating, layer_norm_epsilon, gate_epsilon):
  """The paper's pseudo-code for one sequence x [tokens, channels], in float64."""

  def proj(x, q):
    return x @ q["kernel"] + q["bias"]

  def tiny_attention(x, q):
    q_, k, v = np.split(proj(x, q["qkv"]), 3, axis=-1)
    a = np.exp(q_ @ k.T / np.sqrt(q_.shape[-1]))
    return proj(a / a.sum(-1, keepdims=True) @ v, q["out"])

  def spatial(v, q):
    n = len(v)
    if "Dense_0" in q:
      w, b = q["Dense_0"]["kernel"].T, q["Dense_0"]["bias"]
    else:
      t, b = q["ToeplitzDense_0"]["diagonals"], q["ToeplitzDense_0"]["bias"]
      w = scipy.linalg.toeplitz(t[len(b) - 1 :], t[len(b) - 1 :: -1])
    return w[:n, :n] @ v + b[:n, None]

  y = layer_norm(x, p["norm"], layer_norm_epsilon)
  z = proj(y, p["Dense_0"])
  z = z * (1 + np.vectorize(math.erf)(z / np.sqrt(2))) / 2
  u, v = np.split(z, 2, axis=-1) if gating == "split" else (z, z)
  f = spatial(layer_norm(v, p["spatial_gating"]["norm"], gate_epsilon), p["spatial_gating"])
  if "tiny_attention" in p:
    f = f + tiny_attention(y, p["tiny_attention"])
  s = {"linear": f, "additive": u + f, "multiplicative": u * f, "split": u * f}[gating]
  return x + proj(s, p["Dense_1"])


def numpy_gmlp(p, images, patch, num_blocks, gating):
  """Logits and last tokens of images [batch, height, width, 3], in float64."""
  p = jax.tree.map(np.float64, p)
  x = patches(images, patch, p["stem"])
  for i in range(num_blocks):
    x = np.stack([numpy_block(p[f"GmlpBlock_{i}"], y, gating, *EPSILONS.values()) for y in x])
  y = layer_norm(x, p["norm"], EPSILONS["layer_norm_epsilon"]).mean(1)
  return y @ p["head"]["kernel"] + p["head"]["bias"], x


@pytest.mark.parametrize("name", TIMM_COUNTS)
def test_sizes_are_those_of_timm_and_near_the_paper(name):
  number = count(tree(build(name, 1000, scan_blocks=True)))
  assert number == TIMM_COUNTS[name]
  # 5.87, 19.42 and 73.08 million: the paper prints up to 0.5% more.
  assert number / 1e6 == pytest.approx(PAPER_MILLIONS[name], rel=0.006)


def test_sizes_of_the_other_families_by_formula():
  # S/16: 196 tokens, d 256, d_ffn 1536 and thus a gate of 768 channels, 30 blocks.
  attention = 256 * 3 * 64 + 3 * 64 + 64 * 768 + 768
  s16 = TIMM_COUNTS["gmlp_s16"]
  assert count(tree(build("amlp_s16", 1000, scan_blocks=True))) == s16 + 30 * attention
  toeplitz = 2 * 196 - 1 - 196 * 196
  assert count(tree(build("tmlp_s16", 1000, scan_blocks=True))) == s16 + 30 * toeplitz


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.first(2)
def test_forward_equals_numpy(shape):
  images = images_of(3, 8, 12)
  model = small(**shape, **EPSILONS)
  params = randomised(model, images)
  expected, tokens = numpy_gmlp(params, images, 4, 2, shape.get("gating", "split"))
  logits, found = run(model, params, images)
  np.testing.assert_allclose(logits, expected, rtol=2e-5, atol=2e-5)
  np.testing.assert_allclose(found, tokens, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("gating", gmlp.GATINGS)
@pytest.mark.parametrize("spatial", gmlp.SPATIALS)
@pytest.mark.first(1)
def test_gates_start_as_the_identity(gating, spatial):
  z = jax.random.normal(jax.random.key(0), (2, 9, 6))
  unit = gmlp.SpatialGatingUnit(9, gating, spatial)
  out, variables = unit.init_with_output(jax.random.key(1), z)
  params = variables["params"]
  layer = params["ToeplitzDense_0" if spatial == "toeplitz" else "Dense_0"]
  if gating == "linear":  # no identity: a linear layer, with weights of variance 1 / 9
    weights = layer["diagonals" if spatial == "toeplitz" else "kernel"]
    assert 0.2 < np.std(weights) < 0.5
    np.testing.assert_array_equal(layer["bias"], 0.0)
  else:
    np.testing.assert_array_equal(layer["bias"], 0.0 if gating == "additive" else 1.0)
    np.testing.assert_allclose(out, z[..., :3] if gating == "split" else z, atol=1e-4)


def test_toeplitz_is_the_explicit_matrix():
  diagonals, bias = np.array([1.0, 2, 3, 4, 5]), np.array([10.0, 20, 30])
  matrix = np.array([[3.0, 2, 1], [4, 3, 2], [5, 4, 3]])  # W[i, j] = t[i - j + 2]
  x = np.random.default_rng(0).normal(size=(2, 4, 3))
  layer = gmlp.ToeplitzDense(kernel_init=jax.nn.initializers.normal(1.0))
  params = {"diagonals": diagonals, "bias": bias}
  out = layer.apply({"params": params}, x)
  np.testing.assert_allclose(out, np.einsum("ij,abj->abi", matrix, x) + bias, rtol=1e-5)
  assert count(layer.init(jax.random.key(0), x)) == 2 * 3 - 1 + 3


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.first(2)
def test_masked_tokens_do_not_matter(shape):
  """Real tokens of a padded sequence come out as those of the shorter one."""
  rng = np.random.default_rng(0)
  x, padding = rng.normal(size=(2, 6, 7)), rng.normal(size=(2, 3, 7))
  model = block(**shape, **EPSILONS)
  params = randomised(model, np.zeros((2, 9, 7)))
  padded, mask = np.concatenate([x, padding], axis=1), np.arange(9)[None] < np.array([[6], [6]])
  apply = jax.jit(model.apply)
  out, alone = apply({"params": params}, padded, mask), apply({"params": params}, x)
  np.testing.assert_allclose(out[:, :6], alone, rtol=1e-5, atol=1e-5)
  p = jax.tree.map(np.float64, params)
  expected = [numpy_block(p, y, shape.get("gating", "split"), *EPSILONS.values()) for y in x]
  np.testing.assert_allclose(alone, np.stack(expected), rtol=2e-5, atol=2e-5)
  # The mask did it: without one the padding is seen.
  assert np.abs(apply({"params": params}, padded)[:, :6] - alone).max() > 0.01


def test_masks_may_have_holes_and_differ_by_sequence():
  rng = np.random.default_rng(0)
  mask = np.array([[1, 0, 1, 1, 0, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0, 0, 0, 0]], bool)
  x = rng.normal(size=(2, 9, 7))
  model = block(attention_dim=5)
  params = {"params": randomised(model, x)}
  other = np.where(mask[..., None], x, rng.normal(size=x.shape))
  apply = jax.jit(model.apply)
  first, second = apply(params, x, mask), apply(params, other, mask)
  np.testing.assert_allclose(np.asarray(first)[mask], np.asarray(second)[mask], rtol=1e-6)
  assert np.isfinite(apply(params, x, np.zeros_like(mask))).all()
