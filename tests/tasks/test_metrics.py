"""Metrics that add up: against NumPy, in any order and over any split."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixer_jax.tasks import ExpMean, Largest, Metric, RootMeanSquare, WeightedSum, metrics

KINDS = {
  WeightedSum: lambda v, w: np.sum(v * w) / np.sum(w),
  RootMeanSquare: lambda v, w: np.sqrt(np.sum(v * w) / np.sum(w)),
  ExpMean: lambda v, w: np.exp(np.sum(v * w) / np.sum(w)),
  Largest: lambda v, w: np.max(v[w > 0]),
}
VALUES = np.random.default_rng(0).uniform(0, 3, (12, 2)).astype(np.float32)
WEIGHTS = np.random.default_rng(1).integers(0, 3, (12, 2)).astype(np.float32)


def of(kind, rows):
  weights = WEIGHTS[rows] > 0 if kind is Largest else WEIGHTS[rows]
  return kind.of(jnp.asarray(VALUES[rows]), weights)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.first(2)
def test_any_split_gives_the_value_of_the_whole(kind):
  expected = KINDS[kind](np.float64(VALUES), WEIGHTS)
  for cuts in ((), (4, 9), range(1, 12)):
    bounds = [0, *cuts, 12]
    parts = [of(kind, slice(*pair)) for pair in itertools.pairwise(bounds)]
    merged = functools.reduce(kind.merge, parts, kind.empty())
    assert type(merged) is kind
    np.testing.assert_allclose(merged.value(), expected, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_merging_is_associative_and_empty_is_neutral(kind):
  a, b, c = (of(kind, slice(i, i + 4)) for i in (0, 4, 8))
  close = lambda x, y: jax.tree.map(lambda p, q: np.testing.assert_allclose(p, q, rtol=1e-6), x, y)
  close(a.merge(b).merge(c), a.merge(b.merge(c)))
  close(a.merge(b), b.merge(a))
  jax.tree.map(np.testing.assert_array_equal, kind.empty().merge(a), a)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spoiled", [np.nan, np.inf, -np.inf])
def test_values_of_no_weight_do_not_count(kind, spoiled):
  values = np.where(WEIGHTS == 0, spoiled, VALUES)
  weights = WEIGHTS > 0 if kind is Largest else WEIGHTS
  found = jax.jit(lambda v, w: kind.of(v, w))(values, weights)
  jax.tree.map(np.testing.assert_array_equal, found, of(kind, slice(None)))


def test_weights_are_one_unless_given_and_broadcast():
  assert WeightedSum.of(jnp.arange(4)).value() == 1.5
  found = WeightedSum.of(jnp.array([[1.0, 3.0], [np.nan, np.nan]]), jnp.array([[2], [0]]))
  assert (float(found.total), float(found.weight), float(found.value())) == (8.0, 4.0, 2.0)
  assert np.isnan(WeightedSum.empty().value())
  assert WeightedSum.of(jnp.ones(3, jnp.bfloat16)).total.dtype == jnp.float32
  assert Largest.of(jnp.arange(4), jnp.array([True, True, False, False])).value() == 1


def test_metrics_by_name():
  a, b = ({"x": of(WeightedSum, s), "y": of(Largest, s)} for s in (slice(0, 5), slice(5, 12)))
  shapes = jax.eval_shape(lambda: a)
  whole = metrics.merge(metrics.merge(metrics.empty(shapes), a), b)
  assert metrics.values(whole) == pytest.approx(
    {name: KINDS[kind](VALUES, WEIGHTS) for name, kind in (("x", WeightedSum), ("y", Largest))}
  )


def test_a_metric_says_which_value_is_better_and_how_it_is_shown():
  error, top1 = Metric("error", False), Metric("top1", True, percent=True)
  assert (error.better(1, 2), top1.better(1, 2), top1.better(1, 1)) == (True, False, False)
  assert (error.shown(0.123456), top1.shown(0.123456)) == ("0.1235", "12.35%")
