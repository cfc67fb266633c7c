"""MLP-Mixer against the paper's sizes, the public tree and NumPy."""

import math

import jax
import numpy as np
import pytest

from mixer_jax import models
from tests.models.common import images_of, layer_norm, patches, randomised, run, shapes_of

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


def number(model, size=224):
  return sum(math.prod(shape) for shape in shapes_of(model, size).values())


@pytest.mark.parametrize("name, millions", PAPER_MILLIONS.items())
@pytest.mark.first(3)
def test_sizes_are_those_of_the_paper(name, millions):
  assert round(number(models.build(name, 0, scan_blocks=True)) / 1e6) == millions


@pytest.mark.parametrize("name", RELEASED_COUNTS)
def test_sizes_are_those_of_the_released_weights(name):
  assert number(models.build(name, 1000, scan_blocks=True)) == RELEASED_COUNTS[name]


def test_patch_4_variants_by_formula():
  # S/4 on 32x32: 64 tokens, D_S 256, C 512, D_C 2048.
  block = 2 * 64 * 256 + 256 + 64 + 2 * 512 * 2048 + 2048 + 512 + 4 * 512
  stem, norm, head = 4 * 4 * 3 * 512 + 512, 2 * 512, 512 * 10 + 10
  assert number(models.build("mixer_s4", 10), 32) == 8 * block + stem + norm + head


def test_parameter_tree_is_that_of_the_public_checkpoints():
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
  assert shapes_of(models.build("mixer_b16", 21843), 224) == expected


def numpy_mixer(p, images, patch, num_blocks, attention_heads=0):
  """Equation 1 of the paper, in float64; returns logits and tokens.

  With attention heads, Galerkin attention mixes the tokens (Cao, 2021).
  """

  def norm(x, q, epsilon=1e-6):
    return layer_norm(x, q, epsilon)

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
  x = patches(images, patch, p["stem"])
  for i in range(num_blocks):
    q = p[f"MixerBlock_{i}"]
    x = x + token_mixing(norm(x, q["LayerNorm_0"]), q["token_mixing"])
    x = x + mlp(norm(x, q["LayerNorm_1"]), q["channel_mixing"])
  y = norm(x, p["pre_head_layer_norm"]).mean(1)
  return y @ p["head"]["kernel"] + p["head"]["bias"], x


def small(**overrides):
  fields = dict(hidden_dim=12, num_blocks=2, tokens_mlp_dim=7, channels_mlp_dim=20)
  return models.build("mixer_small", 5, **fields | overrides)


@pytest.mark.parametrize("fields", [{}, dict(token_mixer="galerkin", num_heads=3)], ids=str)
def test_forward_equals_numpy(fields):
  images, model = images_of(3, 8, 12), small(**fields)
  params = randomised(model, images)
  logits, found = run(model, params, images)
  expected, tokens = numpy_mixer(params, images, 4, 2, fields.get("num_heads", 0))
  np.testing.assert_allclose(logits, expected, rtol=2e-5, atol=2e-5)
  # The logits cannot see the second token-mixing bias; the tokens can.
  np.testing.assert_allclose(found, tokens, rtol=2e-5, atol=2e-5)
