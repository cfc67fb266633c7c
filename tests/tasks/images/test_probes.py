"""k-NN by brute force, and the linear probe against SciPy's optimum in float64."""

import numpy as np
import pytest
import scipy.optimize
import scipy.special

from mixer_jax.errors import UserError
from mixer_jax.tasks.images import probes
from mixer_jax.tasks.images.probes import Knn


def clouds(n, classes=3, seed=0, width=4):
  """Features in clouds that overlap, one a class, and their labels."""
  rng = np.random.default_rng(seed)
  centres = np.random.default_rng(7).normal(0, 1.2, (classes, width))
  labels = rng.integers(0, classes, n)
  return (centres[labels] + rng.normal(0, 1, (n, width))).astype(np.float32), labels


@pytest.mark.parametrize("how", [Knn(), Knn(1), Knn(1000), Knn(5, 3.0)])
def test_knn_is_that_of_brute_force(how, monkeypatch):
  monkeypatch.setattr(probes, "_CHUNK", 16)  # which does not divide the queries
  (train, labels), (queries, _) = clouds(150), clouds(41, seed=1)
  found = probes.knn(train, labels, queries, how, classes=4)
  unit = lambda x: x / np.linalg.norm(x.astype(float), axis=1, keepdims=True)
  similarities = unit(queries) @ unit(train).T
  for row, answer in zip(similarities, found, strict=True):
    nearest = np.argsort(-row, kind="stable")[: how.neighbours]
    votes = [np.exp(row[nearest[labels[nearest] == c]] / how.temperature).sum() for c in range(4)]
    assert answer == np.argmax(votes)


def test_neighbours_are_the_same_in_any_unit_and_features_are_finite():
  (train, labels), (queries, _) = clouds(150), clouds(41, seed=1)
  plain = probes.knn(train, labels, queries, Knn(5))
  for unit in np.float32([1e-30, 1e-13, 1e25]):
    np.testing.assert_array_equal(probes.knn(unit * train, labels, unit * queries, Knn(5)), plain)
  queries[3, 0] = np.nan
  with pytest.raises(UserError, match="k-NN: the queries are not all finite"):
    probes.knn(train, labels, queries)


def test_a_small_temperature_does_not_overflow_and_votes_as_the_nearest():
  (train, labels), (queries, _) = clouds(60), clouds(20, seed=1)
  found = probes.knn(train, labels, queries, Knn(10, 1e-3))
  np.testing.assert_array_equal(found, probes.knn(train, labels, queries, Knn(1)))


def test_the_linear_probe_is_scipy_s_optimum():
  features, labels = clouds(200)
  features *= [100, 1, 0.01, 1]  # standardised, so that scales do not matter
  decay, x = 1e-2, (features - features.mean(0)) / features.std(0)
  x = x.astype(float)

  def loss(flat):
    weights, bias = np.split(flat.reshape(5, 3), [4])
    logits = x @ weights + bias
    losses = scipy.special.logsumexp(logits, axis=1) - logits[np.arange(200), labels]
    return losses.mean() + decay / 2 * np.square(weights).sum()

  best = scipy.optimize.minimize(loss, np.zeros(15), method="BFGS", options=dict(gtol=1e-8))
  fitted = probes.fit(features, labels, 3, decay)
  found = np.vstack([fitted.weights, fitted.bias])
  assert loss(found.ravel()) == pytest.approx(best.fun, abs=1e-6)
  np.testing.assert_allclose(found[:4], best.x.reshape(5, 3)[:4], atol=3e-3)
  expected = (x @ found[:4] + found[4]).argmax(1)
  np.testing.assert_array_equal(fitted(features), expected)


def test_one_training_image_fits_no_line():
  with pytest.raises(UserError, match="of 1 training images; allowed: 2 or more"):
    probes.linear(np.ones((1, 3), np.float32), np.zeros(1, int), 2)


def test_held_out_rows_pick_the_decay_and_all_rows_are_fitted():
  features, labels = clouds(120)
  decays = (10.0, 1e-2)  # the first shrinks all weights to nearly zero
  chosen = probes.linear(features, labels, 3, decays)
  held = np.random.default_rng(0).permutation(120)[:12]
  rest = np.setdiff1d(np.arange(120), held)
  score = lambda decay: np.mean(
    probes.fit(features[rest], labels[rest], 3, decay)(features[held]) == labels[held]
  )
  assert chosen.decay == max(decays, key=score) and chosen.held_out == max(map(score, decays))
  whole = probes.fit(features, labels, 3, chosen.decay)
  np.testing.assert_allclose(chosen.weights, whole.weights, atol=1e-2)
  again = probes.linear(features, labels, 3, decays)
  np.testing.assert_array_equal(again.weights, chosen.weights)


def test_a_constant_feature_of_many_rows_is_not_magnified():
  """A sum in float32 of 50,000 times 0.1 is off by more than a real deviation may be."""
  features = np.stack([np.full(50_000, 0.1), np.arange(50_000) % 7], axis=1).astype(np.float32)
  fitted = probes.fit(features, np.arange(50_000) % 2, 2, 1.0)
  assert fitted.scale[0] == 1 and abs(fitted.scale[1] - 2) < 1e-3


def test_a_constant_feature_is_no_trouble():
  features, labels = clouds(50)
  features[:, 1] = 3.0
  fitted = probes.linear(features, labels, 3, (1e-3,))
  assert np.isfinite(fitted.weights).all() and np.abs(fitted.weights[1]).max() < 1e-3
