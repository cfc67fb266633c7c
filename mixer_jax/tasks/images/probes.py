"""Classifiers of frozen features: the nearest neighbours, and a linear one."""

import dataclasses
import functools
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize

from mixer_jax.errors import UserError
from mixer_jax.options import Option

_CHUNK = 512  # queries at once
_HELD_OUT = 0.1  # share of the training features that picks the decay
DECAYS = tuple(10.0**i for i in range(0, -7, -1))
_MOST_STEPS = 500  # of L-BFGS for a decay


@dataclasses.dataclass(frozen=True)
class Knn:
  """The group `config.knn`: classifiers of the training features, as metrics of a run."""

  neighbours: Annotated[int, Option("training images that vote", 1, 10**4, free=True)] = 20
  temperature: Annotated[float, Option("divides their similarities", 1e-3, 100, free=True)] = 0.07
  images: Annotated[int, Option("training images, evenly spaced; 0: all", 0, free=True)] = 0
  linear: Annotated[bool, Option("a linear classifier of the same images, too", free=True)] = False


@functools.partial(jax.jit, static_argnames="k")
def nearest(train: jax.Array, queries: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
  """Cosine similarities and rows of the k nearest of train [n, d] to queries [m, d]: [m, k] each.

  The nearest come first, of equals the earlier row.
  """
  similarities = jnp.matmul(_directions(queries), _directions(train).T, precision="highest")
  return jax.lax.top_k(similarities, k)


def _directions(x: jax.Array) -> jax.Array:
  """Rows [n, d] by their lengths, in any unit; a row of zeros stays one."""
  largest = jnp.max(jnp.abs(x), axis=1, keepdims=True)
  x = x / jnp.where(largest > 0, largest, 1)
  return x / jnp.maximum(jnp.linalg.norm(x, axis=1, keepdims=True), 1)


def knn(
  train: np.ndarray, labels: np.ndarray, queries: np.ndarray, how: Knn = Knn(), classes: int = 0
) -> np.ndarray:
  """The class of each query [m, d] by its nearest neighbours in train [n, d]: int [m].

  A neighbour votes for its label with exp(similarity / temperature), as in DINO after Wu et al.,
  2018, https://arxiv.org/abs/1805.01978; of equal sums the lower class wins. All neighbours vote
  if there are fewer than wanted. A UserError for features that are not finite.
  """
  for name, x in (("training features", train), ("queries", queries)):
    if not np.isfinite(x).all():
      raise UserError(f"k-NN: the {name} are not all finite; allowed: finite numbers")
  k, classes = min(how.neighbours, len(train)), classes or int(labels.max()) + 1
  train, found = jnp.asarray(train), []
  for start in range(0, len(queries), _CHUNK):
    part = queries[start : start + _CHUNK]
    padded = np.zeros((min(_CHUNK, len(queries)), part.shape[1]), part.dtype)
    padded[: len(part)] = part  # one shape, one program
    near, rows = (np.asarray(x)[: len(part)] for x in nearest(train, padded, k))
    votes = np.zeros((len(part), classes))
    # Relative to the nearest one: the exponential of 1 / temperature may be huge.
    shares = np.exp((near - near[:, :1]).astype(np.float64) / how.temperature)
    np.add.at(votes, (np.arange(len(part))[:, None], labels[rows]), shares)
    found.append(votes.argmax(1))
  return np.concatenate(found)


class Linear(NamedTuple):
  """A linear classifier of standardised features.

  `weights` [d, classes] and `bias` [classes] act on (features - mean) / scale; `decay` is that of
  the fit, and `held_out` the accuracy that picked it.
  """

  weights: np.ndarray
  bias: np.ndarray
  mean: np.ndarray
  scale: np.ndarray
  decay: float
  held_out: float

  def __call__(self, features: np.ndarray) -> np.ndarray:
    """The class of each row of features [m, d]: int [m]."""
    return ((features - self.mean) / self.scale @ self.weights + self.bias).argmax(1)


def linear(
  features: np.ndarray, labels: np.ndarray, classes: int, decays: tuple[float, ...] = DECAYS
) -> Linear:
  """Multinomial logistic regression on features [n, d] and labels [n], by L-BFGS on all of them.

  The loss is the mean cross-entropy plus half the decay times the square of the weights, not of the
  bias. Of `decays` the one with the best accuracy on a tenth of the rows, the same for every
  network, is taken, of equals the largest; then all rows are fitted. Nothing in it is random.
  scikit-learn has the same fit, on the CPU alone, and would be one more dependency.
  """
  if len(features) < 2:
    raise UserError(f"a linear classifier of {len(features)} training images; allowed: 2 or more")
  order = np.random.default_rng(0).permutation(len(features))
  held, rest = np.split(order, [max(1, round(_HELD_OUT * len(order)))])
  tried, start = [], None
  for decay in sorted(decays, reverse=True):  # from the strongest: each starts from the one before
    fitted = fit(features[rest], labels[rest], classes, decay, start)
    start = fitted.weights, fitted.bias
    tried.append(fitted._replace(held_out=float(np.mean(fitted(features[held]) == labels[held]))))
  best = max(tried, key=lambda one: one.held_out)
  whole = fit(features, labels, classes, best.decay, (best.weights, best.bias))
  return whole._replace(held_out=best.held_out)


def fit(
  features: np.ndarray, labels: np.ndarray, classes: int, decay: float, start: tuple | None = None
) -> Linear:
  """The fit for one decay, from `start` (weights and bias; None: zeros)."""
  mean, deviation = features.mean(0, np.float64), features.std(0, np.float64)
  scale = np.where(deviation > 1e-6 * np.abs(mean) + 1e-12, deviation, 1.0)
  mean, scale = mean.astype(features.dtype), scale.astype(features.dtype)  # so is their difference
  x, y = jnp.asarray((features - mean) / scale, jnp.float32), jnp.asarray(labels)
  shape = (features.shape[1] + 1, classes)

  def value_and_grad(flat):
    value, grad = _objective(jnp.asarray(flat.reshape(shape), jnp.float32), x, y, decay)
    return float(value), np.asarray(grad, np.float64).ravel()

  first = np.zeros(shape) if start is None else np.vstack([start[0], start[1]])
  limits = dict(maxiter=_MOST_STEPS, maxfun=2 * _MOST_STEPS, ftol=1e-9, gtol=1e-6)
  found = scipy.optimize.minimize(
    value_and_grad, first.ravel(), method="L-BFGS-B", jac=True, options=limits
  )
  weights = found.x.reshape(shape)
  return Linear(weights[:-1], weights[-1], mean, scale, decay, 0.0)


@jax.jit
@jax.value_and_grad
def _objective(weights: jax.Array, x: jax.Array, labels: jax.Array, decay: float) -> jax.Array:
  """The loss of weights [d + 1, classes], the bias in the last row."""
  logits = jnp.matmul(x, weights[:-1], precision="highest") + weights[-1]
  own = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
  loss = jnp.mean(jax.nn.logsumexp(logits, axis=1) - own)
  return loss + 0.5 * decay * jnp.sum(jnp.square(weights[:-1]))
