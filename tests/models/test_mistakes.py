"""Mistakes are named: the field, or what does not fit."""

import functools

import jax
import numpy as np
import pytest

from mixer_jax import models
from mixer_jax.errors import UserError
from mixer_jax.models import absorb, decoding, upernet
from tests.models import test_operators, test_text, test_translation

SMALL = dict(patch_size=4, hidden_dim=12, num_blocks=1)
SIZES = dict(vocab_size=9, max_length=7)


def applied(model, *shapes, **options):
  """Traces the first call of a model of arrays of these shapes."""
  arrays = [np.zeros(shape, np.float32) for shape in shapes]
  return jax.eval_shape(functools.partial(model.init, **options), jax.random.key(0), *arrays)


def image_model(name, size=(8, 8), train=False, **fields):
  return applied(models.build(name, 5, **fields), (1, *size, 3), train=train)


def text_model(backbone, tokens=7, **fields):
  model = test_text.small(backbone, segments=0, **fields)
  ids = np.zeros((1, tokens), int)
  return jax.eval_shape(model.init, jax.random.key(0), ids, ids)


def shortened(length):
  _, variables = test_text.with_params("gmlp toeplitz")
  models.shortened(variables["params"], length)


def operator(name, values=None, **fields):
  model = test_operators.build(name, **fields)
  return applied(model, values, (*values[1:-1], len(values) - 2)) if values else model


def translator(tokens=7, **fields):
  model, ids = test_translation.small("linear", **fields), np.zeros((1, tokens), int)
  return jax.eval_shape(model.init, jax.random.key(0), ids, ids, ids[:, :2], ids[:, :2])


def translated():
  model, ids = test_translation.small("linear"), np.zeros((1, 2), int)
  variables = test_translation.randomised(model)
  decoding.translate(model, variables, ids, ids, length=7, special=decoding.Special(1, 2, 0))


def decoder(**fields):
  backbone = functools.partial(models.VARIANTS["resmlp_s12"], **SMALL | dict(num_blocks=4))
  model = upernet.upernet(
    functools.partial(backbone, pooling=fields.pop("pooling", "average")), 2, **fields
  )
  return applied(model, (1, 16, 16, 3))


def absorbed(size=None, **fields):
  model = models.build("resmlp_s12", 5, **SMALL | fields)
  params = jax.tree.map(
    np.zeros_like, jax.jit(model.init)(jax.random.key(0), np.zeros((1, 8, 12, 3)))
  )
  model, params = absorb.absorb_affine(model, params["params"], size)
  model.apply({"params": params}, np.zeros((1, 12, 8, 3)))


# What is done wrongly, the kind of error, and what its message names.
MISTAKES = [
  (lambda: models.build("mixer_b61", 10), UserError, "mixer_b61.*mixer_b16"),
  (lambda: models.encoder("gmlp_text_smal", **SIZES), UserError, "gmlp_text_small"),
  (lambda: models.translator("resmlp_translate", **SIZES), UserError, "resmlp_translate_6"),
  (lambda: models.operator("galerkin_3d", grid=(8,)), UserError, "galerkin_1d, galerkin_2d"),
  (lambda: models.build("mixer_b16", 10, gelu="relu"), UserError, "model.gelu .*tanh, exact"),
  (
    lambda: models.build("gmlp_small", 10, stochastic_depth=1.0),
    UserError,
    "model.stochastic_depth",
  ),
  (lambda: models.build("resnet_20", 4, stem="tiny"), UserError, "model.stem .*small, large"),
  (lambda: text_model("resmlp", patch_communication="conv3x3"), UserError, "patch_communication"),
  (
    lambda: models.TextClassifier(test_text.small("mixer"), 2, pooling="last"),
    UserError,
    "pooling",
  ),
  (lambda: image_model("mixer_small", (9, 8)), ValueError, "patch_size 4 .* 9x8"),
  (lambda: image_model("gmlp_small", ffn_dim=7, **SMALL), ValueError, "ffn_dim is 7"),
  (lambda: image_model("resnet_18", (32, 32), train=True), UserError, "batch_size"),
  (lambda: text_model("bert", num_heads=3), ValueError, "num_heads 3 .* 8 channels"),
  (
    lambda: image_model("mixer_small", token_mixer="fourier", num_heads=5),
    ValueError,
    "num_heads 5",
  ),
  *((lambda b=b: text_model(b, 8), ValueError, "8 tokens .*max_length 7") for b in test_text.FEW),
  (lambda: translator(), ValueError, "7 tokens .*max_length 6"),
  (lambda: translated(), ValueError, "7 tokens .*max_length 6"),
  (lambda: shortened(8), UserError, "max_length is 8; allowed: 1 to 7"),
  (lambda: shortened(0), UserError, "max_length is 0; allowed: 1 to 7"),
  (lambda: operator("mixer_operator", grid=(8, 8, 8)), UserError, "axes of a grid is 3"),
  (lambda: operator("mixer_operator", patch_size=13), UserError, "patch_size is 13"),
  (lambda: operator("fno_2d", modes=9), UserError, "modes is 9.*16x14 points; it has 13x13"),
  (lambda: operator("galerkin_1d", modes=9), UserError, "modes is 9.* 16 points; it has 13"),
  (lambda: operator("galerkin_2d", coarse=13), UserError, "coarse is 13; .* 12x12 points"),
  (lambda: operator("galerkin_1d", coarse=5), UserError, "coarse is 5.*extractor"),
  (lambda: operator("galerkin_inverse", modes=5), UserError, "modes is 5.*decoder"),
  (
    lambda: operator("mixer_operator", (1, 8, 1)),
    ValueError,
    "trained on 10 points, called with 8",
  ),
  (lambda: operator("fno_2d", (1, 4, 4, 1)), ValueError, "too few for 3 modes; allowed: 6x4"),
  (lambda: operator("galerkin_1d", (1, 13, 2)), ValueError, "values are .1, 13, 2."),
  *(
    (lambda b=b: decoder(blocks=b), ValueError, "decoder.blocks") for b in ((0, 1, 2), (0, 2, 1, 3))
  ),
  (lambda: decoder(blocks=(0, 1, 2, 4)), ValueError, "decoder.blocks.* last 3"),
  (lambda: decoder(pooling="class_mlp"), ValueError, "no grid of features"),
  (lambda: absorbed(normalization="layer_norm"), ValueError, "normalization is 'layer_norm'"),
  (lambda: absorbed(patch_communication="conv3x3"), ValueError, "image_size is None"),
  (lambda: absorbed((8, 12), patch_communication="conv3x3"), ValueError, "images have shape"),
]


@pytest.mark.parametrize("mistake, kind, message", MISTAKES)
def test_mistakes_are_named(mistake, kind, message):
  with pytest.raises(kind, match=message):
    mistake()
