"""UperNet against NumPy, and its features against shorter backbones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixer_jax import models
from mixer_jax.images.augment import bilinear_matrix
from mixer_jax.models import upernet

SMALL = {
  "mixer_small": dict(patch_size=4, hidden_dim=8, tokens_mlp_dim=6, channels_mlp_dim=8),
  "resmlp_s12": dict(patch_size=4, hidden_dim=8, channels_mlp_dim=8, layer_scale_init=0.5),
  "gmlp_s16": dict(patch_size=4, hidden_dim=8, ffn_dim=8),
}
IMAGES = np.random.default_rng(0).normal(size=(2, 16, 16, 3)).astype(np.float32)


def shapes_of(model, size):
  init = functools.partial(model.init, jax.random.key(0))
  return jax.eval_shape(init, jnp.zeros((1, size, size, 3)))["params"]


@pytest.mark.thorough
def test_the_published_size_has_the_published_layers():
  """ResMLP-S12, width 512, 150 classes: every weight of the paper's decoder, and norms."""
  model = upernet.upernet(models.VARIANTS["resmlp_s12"], 150, auxiliary=0.4)
  assert model.backbone.feature_blocks == (3, 5, 7, 11)  # XCiT's and BEiT's of 12
  shapes = shapes_of(model, 224)
  count = lambda name: sum(x.size for x in jax.tree.leaves(shapes[name]))
  c, w, norm = 384, 512, 2 * 512
  expected = {f"pool_{n}": c * w + norm for n in (1, 2, 3, 6)}
  expected |= {f"lateral_{i}": c * w + norm for i in range(3)}
  expected |= {f"output_{i}": 9 * w * w + norm for i in range(3)}
  expected |= {"pyramid": 9 * (c + 4 * w) * w + norm, "fusion": 9 * 4 * w * w + norm}
  expected |= dict.fromkeys(("up_4_first", "up_4_second", "up_2"), 4 * c * (c + 1))
  expected |= {"up_4_norm": 2 * c, "head": 150 * (w + 1)}
  expected |= {"auxiliary": 9 * c * w // 2 + w, "auxiliary_head": 150 * (w // 2 + 1)}
  headless = models.build("resmlp_s12", 0)
  assert shapes["backbone"] == shapes_of(headless, 224)
  assert {name: count(name) for name in shapes if name != "backbone"} == expected
  apply = lambda params, x: model.apply(
    {"params": params}, x, train=True, rngs={"dropout": jax.random.key(0)}
  )
  logits, second = jax.eval_shape(apply, shapes, jnp.zeros((1, 224, 224, 3)))
  assert (logits.shape, second.shape) == ((1, 56, 56, 150), (1, 14, 14, 150))


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.thorough
def test_features_are_the_tokens_of_shorter_backbones(name):
  build = functools.partial(models.VARIANTS[name], num_classes=0, **SMALL[name])
  whole = build(num_blocks=4, feature_blocks=(0, 1, 1, 3))
  params = jax.jit(whole.init)(jax.random.key(0), IMAGES)["params"]
  rng = np.random.default_rng(1)
  params = jax.tree.map(lambda x: x + rng.normal(0, 0.2, x.shape).astype(np.float32), params)
  applied = lambda model, params: jax.jit(model.apply)({"params": params}, IMAGES)
  grids = applied(whole, params)
  for depth, grid in zip((1, 2, 2), grids):
    shorter = build(num_blocks=depth)
    kept = {k: v for k, v in params.items() if k in shapes_of(shorter, 16)}
    sow = jax.jit(functools.partial(shorter.apply, mutable=["intermediates"]))
    tokens = sow({"params": kept}, IMAGES)[1]["intermediates"]["tokens"][0]
    np.testing.assert_allclose(grid.reshape(2, 16, 8), tokens, rtol=1e-5, atol=1e-6)
  pooled = applied(whole.clone(feature_blocks=()), params)
  np.testing.assert_allclose(grids[3].mean((1, 2)), pooled, rtol=1e-5, atol=1e-6)
  scanned = whole.clone(scan_blocks=True)
  same = applied(scanned, models.stacked(params))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), same, grids)


def test_points_become_four():
  layer = upernet._Doubled(3, "float32")
  x = np.random.default_rng(0).normal(size=(2, 2, 3, 5)).astype(np.float32)
  params = jax.jit(layer.init)(jax.random.key(0), x)["params"]
  kernel = np.asarray(params["dense"]["kernel"]).reshape(5, 2, 2, 3)
  found = layer.apply({"params": params}, x)
  expected = np.zeros((2, 4, 6, 3))
  for b, i, j, m, n in np.ndindex(2, 2, 3, 2, 2):
    expected[b, 2 * i + m, 2 * j + n] = x[b, i, j] @ kernel[:, m, n]
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size, side", [((7, 4), 6), ((7, 8), 3), ((2, 5), 1)])
def test_pooling_takes_means_of_areas(size, side):
  x = np.random.default_rng(0).normal(size=(2, *size, 3)).astype(np.float32)
  expected = np.empty((2, side, side, 3))
  for i, j in np.ndindex(side, side):
    rows, columns = (
      slice(int(np.floor(k * n / side)), int(np.ceil((k + 1) * n / side)))
      for k, n in zip((i, j), size)
    )
    expected[:, i, j] = x[:, rows, columns].mean((1, 2))
  np.testing.assert_allclose(upernet.mean_pool(x, side), expected, rtol=1e-5, atol=1e-6)


def test_interpolation_is_that_of_pillow_where_it_enlarges():
  x = np.random.default_rng(0).normal(size=(1, 3, 4, 2)).astype(np.float32)
  rows, columns = bilinear_matrix(12, 3), bilinear_matrix(8, 4)
  expected = np.einsum("ih,bhwc,jw->bijc", rows, x, columns)
  np.testing.assert_allclose(upernet.resized(x, (12, 8)), expected, rtol=1e-5, atol=1e-6)
