"""MLP-Mixer against the paper's sizes, the public tree and NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixer_jax import models

# Millions of parameters without the head: Table 1 of the Mixer paper.
PAPER_MILLIONS = {
  "mixer_s32": 19,
  "mixer_s16": 18,
  "mixer_b32": 60,
  "mixer_b16": 59,
  "mixer_l32": 206,
  "mixer_l16": 207,
  "mixer_h14": 431,
}
# With 1,000 classes, as counted for the released checkpoints.
RELEASED_COUNTS = {
  "mixer_b16": 59_880_472,
  "mixer_b32": 60_293_428,
  "mixer_l16": 208_196_168,
}


def shapes(name, size=224, classes=1000, **overrides):
  model = models.build(name, classes, **overrides)
  return jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, size, size, 3)))["params"]


def count(params):
  return sum(x.size for x in jax.tree.leaves(params))


@pytest.mark.parametrize("name, millions", PAPER_MILLIONS.items())
@pytest.mark.first(3)
def test_sizes_are_those_of_the_paper(name, millions):
  params = shapes(name, scan_blocks=True)
  assert round((count(params) - count(params["head"])) / 1e6) == millions


@pytest.mark.parametrize("name, number", RELEASED_COUNTS.items())
def test_sizes_are_those_of_the_released_weights(name, number):
  assert count(shapes(name, scan_blocks=True)) == number


def test_patch_4_variants_by_formula():
  # S/4 on 32x32: 64 tokens, D_S 256, C 512, D_C 2048.
  block = 2 * 64 * 256 + 256 + 64 + 2 * 512 * 2048 + 2048 + 512 + 4 * 512
  stem, norm, head = 4 * 4 * 3 * 512 + 512, 2 * 512, 512 * 10 + 10
  assert count(shapes("mixer_s4", 32, 10)) == 8 * block + stem + norm + head


def test_parameter_tree_is_that_of_the_public_checkpoints():
  params = shapes("mixer_b16", classes=21843)
  paths = {
    "/".join(k.key for k in path): x.shape
    for path, x in jax.tree_util.tree_leaves_with_path(params)
  }
  block = {
    "LayerNorm_0/bias": (768,),
    "LayerNorm_0/scale": (768,),
    "LayerNorm_1/bias": (768,),
    "LayerNorm_1/scale": (768,),
    "channel_mixing/Dense_0/bias": (3072,),
    "channel_mixing/Dense_0/kernel": (768, 3072),
    "channel_mixing/Dense_1/bias": (768,),
    "channel_mixing/Dense_1/kernel": (3072, 768),
    "token_mixing/Dense_0/bias": (384,),
    "token_mixing/Dense_0/kernel": (196, 384),
    "token_mixing/Dense_1/bias": (196,),
    "token_mixing/Dense_1/kernel": (384, 196),
  }
  expected = {f"MixerBlock_{i}/{k}": s for i in range(12) for k, s in block.items()} | {
    "stem/kernel": (16, 16, 3, 768),
    "stem/bias": (768,),
    "pre_head_layer_norm/scale": (768,),
    "pre_head_layer_norm/bias": (768,),
    "head/kernel": (768, 21843),
    "head/bias": (21843,),
  }
  assert paths == expected


def randomised(model, images):
  """Parameters of the model's tree, all non-trivial."""
  tree = jax.eval_shape(model.init, jax.random.key(0), images)["params"]
  rng = np.random.default_rng(1)
  return jax.tree.map(lambda x: rng.normal(0.2, 0.3, x.shape).astype(np.float32), tree)


def numpy_mixer(p, images, patch, num_blocks, attention_heads=0):
  """Equation 1 of the paper, in float64; returns logits and tokens.

  With attention heads, Galerkin attention mixes the tokens (Cao, 2021).
  """

  def norm(x, q, epsilon=1e-6):
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(var + epsilon) * q["scale"] + q["bias"]

  def mlp(x, q):
    x = x @ q["Dense_0"]["kernel"] + q["Dense_0"]["bias"]
    x = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return x @ q["Dense_1"]["kernel"] + q["Dense_1"]["bias"]

  def galerkin(x, p):
    rows, columns = h // patch, w // patch
    centres = [((i + 0.5) / rows, (j + 0.5) / columns) for i in range(rows) for j in range(columns)]
    out, n, width = [], x.shape[1], x.shape[2] // attention_heads
    for head in range(attention_heads):
      q, k, v = (
        (x @ p[name]["kernel"] + p[name]["bias"])[..., head * width : (head + 1) * width]
        for name in "qkv"
      )
      k = norm(k, {a: s[head] for a, s in p["k_norm"].items()}, 1e-5)
      v = norm(v, {a: s[head] for a, s in p["v_norm"].items()}, 1e-5)
      q, k, v = (np.concatenate([np.tile(centres, (b, 1, 1)), y], axis=-1) for y in (q, k, v))
      out.append(q @ (k.swapaxes(1, 2) @ v) / n)
    return np.concatenate(out, axis=-1) @ p["out"]["kernel"] + p["out"]["bias"]

  def token_mixing(x, p):
    return galerkin(x, p) if attention_heads else mlp(x.swapaxes(1, 2), p).swapaxes(1, 2)

  p = jax.tree.map(np.float64, p)
  b, h, w, _ = images.shape
  x = images.reshape(b, h // patch, patch, w // patch, patch, 3).swapaxes(2, 3)
  x = x.reshape(b, -1, patch * patch * 3) @ p["stem"]["kernel"].reshape(patch * patch * 3, -1)
  x = x + p["stem"]["bias"]
  for i in range(num_blocks):
    q = p[f"MixerBlock_{i}"]
    x = x + token_mixing(norm(x, q["LayerNorm_0"]), q["token_mixing"])
    x = x + mlp(norm(x, q["LayerNorm_1"]), q["channel_mixing"])
  y = norm(x, p["pre_head_layer_norm"]).mean(1)
  return y @ p["head"]["kernel"] + p["head"]["bias"], x


def small(**overrides):
  fields = dict(hidden_dim=12, num_blocks=2, tokens_mlp_dim=7, channels_mlp_dim=20)
  return models.build("mixer_small", 5, **fields | overrides)


def run(model, params, images, **kw):
  """Logits and tokens, from one compiled program."""
  apply = jax.jit(lambda *args: model.apply(*args, mutable=["intermediates"], **kw))
  logits, state = apply({"params": params}, images)
  return logits, np.asarray(state["intermediates"]["tokens"][0])


def test_forward_equals_numpy():
  images = np.random.default_rng(0).normal(size=(3, 8, 12, 3))
  model = small()
  params = randomised(model, images)
  logits, found = run(model, params, images)
  expected, tokens = numpy_mixer(params, images, 4, 2)
  np.testing.assert_allclose(logits, expected, rtol=2e-5, atol=2e-5)
  # The logits cannot see the second token-mixing bias; the tokens can.
  np.testing.assert_allclose(found, tokens, rtol=2e-5, atol=2e-5)


def test_galerkin_mixer_equals_numpy():
  images = np.random.default_rng(0).normal(size=(3, 8, 12, 3))
  model = small(token_mixer="galerkin", num_heads=3)
  params = randomised(model, images)
  logits, found = run(model, params, images)
  expected, tokens = numpy_mixer(params, images, 4, 2, attention_heads=3)
  np.testing.assert_allclose(logits, expected, rtol=2e-5, atol=2e-5)
  np.testing.assert_allclose(found, tokens, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
  "token_mixer, dtype",
  [
    ("galerkin", "bfloat16"),
    ("fourier", "float32"),
    pytest.param("galerkin", "float32", marks=pytest.mark.slow),
    pytest.param("fourier", "bfloat16", marks=pytest.mark.slow),
  ],
)
@pytest.mark.thorough
def test_mixers_with_attention_run_in_any_size(token_mixer, dtype):
  model = small(token_mixer=token_mixer, num_heads=3, dtype=dtype)
  params = jax.jit(model.init)(jax.random.key(0), jnp.ones((1, 8, 8, 3)))["params"]
  assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
  params["head"]["kernel"] += 1.0 + jnp.arange(5)
  for size in ((8, 8), (12, 20)):
    images = np.random.default_rng(1).normal(size=(2, *size, 3))
    logits, _ = run(model, params, images)
    assert logits.shape == (2, 5) and logits.dtype == jnp.float32
    assert np.isfinite(logits).all()


def test_head_starts_at_zero():
  images = jnp.ones((2, 8, 8, 3))
  logits, _ = jax.jit(small().init_with_output)(jax.random.key(0), images)
  np.testing.assert_array_equal(logits, 0.0)


@pytest.mark.thorough
def test_bfloat16_computes_low_and_stores_high():
  images = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype(np.float32)
  params = randomised(small(), images)
  low = small(dtype="bfloat16")
  logits, tokens = run(low, params, images)
  assert tokens.dtype == jnp.bfloat16
  assert logits.dtype == jnp.float32
  own = jax.eval_shape(low.init, jax.random.key(0), images)["params"]
  assert {x.dtype for x in jax.tree.leaves(own)} == {jnp.dtype("float32")}
  np.testing.assert_allclose(logits, run(small(), params, images)[0], rtol=0.1, atol=0.3)


@pytest.mark.thorough
def test_stochastic_depth_drops_whole_branches():
  images = np.random.default_rng(0).normal(size=(64, 8, 8, 3)).astype(np.float32)
  model = small(stochastic_depth=0.5)
  params = randomised(model, images)
  _, dropped = run(model, params, images, train=True, rngs={"dropout": jax.random.key(0)})
  # Rates grow from 0 at the first block to 0.5 at the last. One whose two last
  # branches are both dropped leaves with the tokens that enter the last block.
  _, kept = run(model, params, images)
  np.testing.assert_array_equal(kept, run(model, params, images, train=False)[1])
  del params["MixerBlock_1"]
  _, before = run(small(num_blocks=1), params, images)
  untouched = np.isclose(dropped, before, rtol=1e-5, atol=1e-5).all(axis=(1, 2))
  assert 6 <= untouched.sum() <= 28  # binomial(64, 1/4)


@pytest.mark.thorough
def test_dropout_acts_in_training_only():
  images = jnp.ones((2, 8, 8, 3))
  model = small(dropout_rate=0.5)
  params = randomised(model, images)
  train = lambda key: run(model, params, images, train=True, rngs={"dropout": jax.random.key(key)})
  assert not np.allclose(train(0)[0], train(1)[0])
  np.testing.assert_array_equal(run(model, params, images)[0], run(small(), params, images)[0])
