"""A batch of no examples, as the last one of a loop of one's own may be, has outputs of no examples."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixer_jax import models
from mixer_jax.models import upernet

IMAGES = {
  "mixer_s32": {},
  "mixer_s16": dict(token_mixer="galerkin"),
  "mixer_b16": dict(token_mixer="fourier"),
  "mixer_b32": dict(num_classes=0, feature_blocks=(0,)),
  "resmlp_s12": {},
  "resmlp_s24": dict(pooling="class_mlp"),
  "gmlp_s16": dict(scan_blocks=True),
  "resnet_20": {},
  "regnety_002": {},
}
OPERATORS = {"galerkin_1d": 1, "galerkin_2d": 2, "fno_1d": 1, "fno_2d": 2}
OPERATORS |= {"mixer_operator": 1, "gmlp_operator": 2, "resmlp_operator": 2}


def check(model, *inputs, same=()):
  """Compares the shapes of outputs; `same` are inputs without an axis of examples."""
  variables = jax.eval_shape(model.init, jax.random.key(0), *inputs, *same)
  of = lambda number: jax.eval_shape(model.apply, variables, *(x[:number] for x in inputs), *same)
  expected = jax.tree.map(lambda x: (0, *x.shape[1:]), of(2))
  assert jax.tree.map(lambda x: x.shape, of(0)) == expected


@pytest.mark.parametrize("name", IMAGES)
def test_no_images(name):
  own = {"num_classes": 3, "num_blocks": 2, "hidden_dim": 16, "patch_size": 16} | IMAGES[name]
  number = own.pop("num_classes")
  known = {k: v for k, v in own.items() if k in models.fields(name)}
  check(models.build(name, number, **known), np.zeros((2, 64, 64, 3), np.float32))


@pytest.mark.parametrize(
  "name", ["mixer_text_small", "resmlp_text_small", "gmlp_text_small", "bert_tiny"]
)
@pytest.mark.parametrize("pooling", ["mean", "pooler"])
def test_no_texts(name, pooling):
  encoder = models.encoder(name, vocab_size=20, max_length=6, num_blocks=1)
  ids = np.zeros((2, 6), np.int32)
  check(models.TextClassifier(encoder, 3, pooling), ids, ids == 0)


@pytest.mark.parametrize("name", OPERATORS)
def test_no_functions(name):
  grid = (32,) * OPERATORS[name]
  coarse = dict(coarse=16) if name == "galerkin_2d" else {}
  model = models.operator(name, grid=grid, num_blocks=1, hidden_dim=16, **coarse)
  positions = np.stack(np.meshgrid(*[np.arange(32) / 32 for _ in grid], indexing="ij"), -1)
  check(model, np.zeros((2, *grid, 1), np.float32), same=(positions.astype("f4"),))


def test_no_images_of_a_decoder():
  small = dict(num_blocks=4, hidden_dim=16, patch_size=16)
  backbone = functools.partial(models.build, "resmlp_s12", **small)
  model = upernet.upernet(backbone, 3, width=8, auxiliary=0.4)
  check(model, np.zeros((2, 64, 64, 3), np.float32))


def test_no_translations():
  model = models.translator("resmlp_translate_small", vocab_size=20, max_length=6)
  ids = np.zeros((2, 6), np.int32)
  check(model, ids, ids == 0, ids, ids == 0)


def test_no_images_through_compiled_code():
  model = models.build("mixer_s32", 3, num_blocks=1, hidden_dim=8, patch_size=16)
  params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 32, 32, 3)))
  loss = lambda params, images: model.apply(params, images).sum()
  found, gradient = jax.jit(jax.value_and_grad(loss))(params, jnp.zeros((0, 32, 32, 3)))
  assert found == 0.0 and not any(np.any(x) for x in jax.tree.leaves(gradient))
