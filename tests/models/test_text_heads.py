"""Heads on encoders of text, and K-FAC's view of both."""

import re

import jax
import numpy as np
import pytest

from mixer_jax import models
from mixer_jax.optim import Curvature
from tests.models.common import flat, randomised
from tests.models.test_text import FEW, VOCAB, run, sequences, small


def test_masked_lm_has_the_logits_of_its_positions():
  ids, mask, segments = sequences()
  positions = np.array([[0, 4], [2, 0], [3, 1]])
  encoder = small("gmlp split")
  tied, untied = models.MaskedLm(encoder), models.MaskedLm(encoder, tied=False)
  params = randomised(tied, ids, mask, segments, positions)
  x = run(encoder, {"params": params["encoder"]}, ids, mask, segments)
  x = np.stack([y[p] for y, p in zip(np.float64(x), positions)])
  assert {k: v.shape for k, v in flat(params["head"]).items()} == {"bias": (VOCAB,)}
  expected = x @ params["encoder"]["words"]["embedding"].T + params["head"]["bias"]
  found = run(tied, {"params": params}, ids, mask, segments, positions)
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
  own = randomised(untied, ids, mask, segments, positions)
  assert {k: v.shape for k, v in flat(own["head"]).items()} == dict(
    kernel=(8, VOCAB), bias=(VOCAB,)
  )
  both = {"encoder": params["encoder"], "head": own["head"]}
  found = run(untied, {"params": both}, ids, mask, segments, positions)
  np.testing.assert_allclose(found, x @ own["head"]["kernel"] + own["head"]["bias"], rtol=1e-4)


@pytest.mark.parametrize("pooling", ["first", "mean", "pooler"])
@pytest.mark.thorough
def test_classifier_pools_real_tokens(pooling):
  ids, mask, segments = sequences()
  model = models.TextClassifier(small("mixer"), num_classes=3, pooling=pooling)
  start, _ = jax.jit(model.init_with_output)(jax.random.key(0), ids, mask, segments)
  np.testing.assert_array_equal(start, np.zeros((3, 3)))
  params = randomised(model, ids, mask, segments)
  x = run(model.encoder, {"params": params["encoder"]}, ids, mask, segments)
  x = [np.float64(y)[m] for y, m in zip(x, mask)]
  x = np.stack([y.mean(axis=0) if pooling == "mean" else y[0] for y in x])
  if pooling == "pooler":
    x = np.tanh(x @ params["pooler"]["kernel"] + params["pooler"]["bias"])
  expected = x @ params["head"]["kernel"] + params["head"]["bias"]
  found = run(model, {"params": params}, ids, mask, segments)
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backbone, tied", [*((b, True) for b in FEW), ("mixer", False)])
@pytest.mark.thorough
def test_every_matrix_has_a_kronecker_block_and_padding_counts_in_none(backbone, tied):
  """Positions are weighed, as in the loss of a masked language model; the last one is empty."""
  model = models.MaskedLm(small(backbone, segments=0, num_blocks=1), tied)
  ids, mask, _ = sequences((5, 5, 5))
  positions = np.tile(np.arange(6), (3, 1))
  weights = (positions < 5).astype(np.float32)
  targets = ids[:, :6]
  padded = dict(ids=ids, mask=mask, positions=positions, targets=targets, weights=weights)
  whole = {k: v[:, :5] for k, v in padded.items()}
  params = randomised(model, ids, mask, None, positions)

  def predict(params, b):
    logits = model.apply({"params": params}, b["ids"], b["mask"], None, b["positions"])
    return logits, b["targets"], b["weights"]

  options = dict(estimation="empirical")
  curvature = Curvature(predict, params, padded, **options)
  kinds = {path: block.kind for block in curvature.blocks for path in block.paths}
  assert kinds.keys() == flat(params).keys()
  for path, kind in kinds.items():
    matrix = re.search("(kernel|embedding)$", path) or path.endswith("Dense_0/bias")
    if matrix and "Toeplitz" not in path:
      assert kind == "kronecker", path
    if "Toeplitz" in path or "norm" in path.split("/")[-2]:
      assert kind == "gradient", path
  found, expected = (jax.jit(curvature.estimate)(params, b) for b in (padded, whole))
  scale = lambda x: 1e-5 * np.abs(x).max() + 1e-7
  compare = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=scale(b))
  jax.tree.map(compare, found, expected)
