"""Absorbed affine layers: the same outputs from fewer operations."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixer_jax.models import absorb, blocks, resmlp
from tests.models.common import count, images_of, run, tree_of

SIZE = (8, 12)  # 2 x 3 patches
IMAGES = images_of(3, *SIZE)
# By counting the equations: additions and multiplications that a block loses.
FEWER = dict(linear=5, none=3, mlp=3, conv3x3=6, depthwise=6, separable=7)
CASES = [(kind, "average") for kind in FEWER] + [("linear", "class_mlp"), ("mlp", "class_mlp")]


def small(kind="linear", pooling="average", **overrides):
  fields = dict(
    patch_size=4,
    hidden_dim=12,
    num_blocks=2,
    channels_mlp_dim=48,
    layer_scale_init=0.1,
    patch_communication=kind,
    pooling=pooling,
  )
  return resmlp.ResMlp(num_classes=5, **fields | overrides)


def randomised(model):
  """Parameters that keep the tokens' size; each affine layer has a zero scale."""
  rng = np.random.default_rng(1)

  def leaf(path, x):
    if path[-1].key == "kernel":
      return rng.normal(0.0, (x.size / x.shape[-1]) ** -0.5, x.shape).astype(np.float32)
    value = rng.normal(0.3, 0.5, x.shape).astype(np.float32)
    if path[-1].key == "scale":
      value[3] = 0.0
    return value

  return jax.tree_util.tree_map_with_path(leaf, tree_of(model, IMAGES))


@pytest.mark.parametrize("kind, pooling", CASES)
@pytest.mark.first(1)
def test_outputs_are_equal(kind, pooling):
  model = small(kind, pooling)
  params = randomised(model)
  logits, tokens = run(model, params, IMAGES)
  assert np.std(logits) > 0.1 and np.std(tokens) > 0.1
  own_logits, own_tokens = run(*absorb.absorb_affine(model, params, SIZE), IMAGES)
  np.testing.assert_allclose(own_logits, logits, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(own_tokens, tokens, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pooling", ["average", "class_mlp"])
@pytest.mark.first(1)
def test_bfloat16_rounds_the_absorbed_model_no_more_than_the_model_itself(pooling):
  """Tokens of 16 bits and logits of 32, as near to those of float32."""
  model = small(pooling=pooling, dtype="bfloat16")
  params = randomised(model)
  exact = run(small(pooling=pooling), params, IMAGES)
  own = run(model, params, IMAGES)
  logits, tokens = run(*absorb.absorb_affine(model, params), IMAGES)
  assert tokens.dtype == jnp.bfloat16 and logits.dtype == jnp.float32
  far = lambda x, y: np.linalg.norm(np.float32(x) - y) / np.linalg.norm(y)
  for found, rounded, wanted in zip((logits, tokens), own, exact):
    assert 1e-4 < far(found, wanted) < max(1.5 * far(rounded, wanted), 0.01)


def test_scanned_blocks_are_absorbed_one_by_one():
  params = randomised(small())
  _, expected = absorb.absorb_affine(small(), params)
  model, found = absorb.absorb_affine(small(scan_blocks=True), blocks.stacked(params))
  assert jax.tree.structure(found) == jax.tree.structure(tree_of(model, IMAGES))
  jax.tree.map(np.testing.assert_array_equal, found, expected)


def elementwise(model, params):
  """The number of additions and multiplications in a forward pass."""
  counts = collections.Counter()

  def visit(jaxpr):
    for equation in jaxpr.eqns:
      counts[equation.primitive.name] += 1
      for inner in jax.tree.leaves(list(equation.params.values())):
        if jaxpr := getattr(inner, "jaxpr", inner if hasattr(inner, "eqns") else None):
          visit(jaxpr)

  visit(jax.make_jaxpr(model.apply)({"params": params}, IMAGES).jaxpr)
  return counts["add"] + counts["mul"]


@pytest.mark.parametrize("kind, pooling", CASES)
@pytest.mark.first(2)
def test_there_are_fewer_operations(kind, pooling):
  model = small(kind, pooling)
  params = randomised(model)
  saved = elementwise(model, params) - elementwise(*absorb.absorb_affine(model, params, SIZE))
  last_norm, class_layers = 2, 2 * 5 if pooling == "class_mlp" else 0
  assert saved == model.num_blocks * FEWER[kind] + last_norm + class_layers


@pytest.mark.parametrize("kind, pooling", CASES)
@pytest.mark.first(3)
def test_parameters_fit_the_model(kind, pooling):
  model = small(kind, pooling)
  params = jax.tree.map(jnp.asarray, randomised(model))
  absorbed, own = absorb.absorb_affine(model, params, SIZE)
  expected = jax.tree.map(lambda x: (x.shape, np.dtype("float32")), tree_of(absorbed, IMAGES))
  assert jax.tree.map(lambda x: (x.shape, x.dtype), own) == expected


def test_s12_gains_a_term_a_block():
  model = resmlp.FAMILY.variants["resmlp_s12"](num_classes=1000)
  absorbed = absorb.AbsorbedResMlp(
    num_classes=1000, patch_size=16, hidden_dim=384, num_blocks=12, channels_mlp_dim=1536
  )
  before, after = (count(tree_of(m, jnp.zeros((1, 224, 224, 3)))) for m in (model, absorbed))
  # Gone: two Affs, LayerScale twice, the bias over tokens, and the last Aff.
  gained = 12 * (384 + 196 * 384 - 2 * 2 * 384 - 2 * 384 - 196) - 2 * 384
  assert after - before == gained
  assert round(gained / before, 2) == 0.06
