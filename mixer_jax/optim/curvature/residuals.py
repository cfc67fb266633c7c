"""The residuals of a batch, and their derivative J, whose square J^T J is the Gauss-Newton matrix.

With outputs y of rows with the weights w, and B B^T the Fisher matrix of a row's outputs, the
residuals r are those with B r = w^(1/2) times the gradient of minus the log-likelihood of the row,
and J is w^(1/2) B^T dy/dtheta. Then J^T r is the gradient of the loss and J^T J its Gauss-Newton
(Fisher) matrix. Of "normal" outputs residuals are (2 w)^(1/2) (y - target).
"""

import itertools
import math
from typing import Any, Callable, Mapping, NamedTuple, Sequence

import jax
import jax.numpy as jnp

from mixer_jax.optim.curvature.estimation import joined
from mixer_jax.optim.curvature.likelihoods import Likelihood
from mixer_jax.optim.curvature.predictor import Predictor, root_weights
from mixer_jax.optim.curvature.traced import Traced


class Residuals(NamedTuple):
  """The residuals of a batch at some parameters, made by `Curvature.residuals`.

  Attributes:
    vector: r, [N]: by term, by output of an example, by example.
    push: from a tree like the parameters to J times it, [N].
    pull: from a vector [N] to J^T times it, a tree like the parameters.
    bend: from a tree like the parameters to B^T times the second derivative of the outputs along
      it, scaled as J is, [N]; of "normal" outputs this is the second derivative of r.
    column: (i, term) -> what the program of this term gets as the gradient of its outputs to have
      the rows of J of output i of each of its examples.
    outputs: how many outputs an example of each term has.
  """

  vector: jax.Array
  push: Callable[[Any], jax.Array]
  pull: Callable[[jax.Array], Any]
  bend: Callable[[Any], jax.Array]
  column: Callable[[Any, int], Any]
  outputs: tuple[int, ...]


def residuals(
  traced: Traced,
  predictor: Predictor,
  params: Any,
  batch: Any,
  with_targets: bool = True,
  axis_name: Any = None,
) -> Residuals:
  """The residuals of a batch; those without targets, as of equations, have targets of zero.

  Raises:
    ValueError: no targets, of outputs whose targets are labels.
  """
  likelihood, flat = predictor.likelihood, list(map(jnp.asarray, jax.tree.leaves(batch)))

  def answers(params):
    leaves = list(map(jnp.asarray, jax.tree.leaves(params)))
    found = [t.run(leaves, flat, jnp.ones(t.tokens), {}, {}) for t in traced.terms]
    cast = lambda x: jax.tree.map(lambda y: y.astype(predictor.dtype), x)
    return [cast(answer.outputs) for answer in found], found

  parts, push, found = jax.linearize(answers, params, has_aux=True)
  outputs = joined(parts)
  weights = [predictor.weights(answer)[0] for answer in found]
  scales = joined([root_weights(w, y, axis_name) for w, y in zip(weights, parts)])
  scaled = lambda tree: jax.tree.map(jnp.multiply, tree, scales)
  order = _Order(parts, [t.examples if t.mapped else 1 for t in traced.terms])
  factor = lambda v: scaled(likelihood.factor(outputs, v))
  back = jax.linear_transpose(factor, outputs)
  pull = jax.linear_transpose(push, params)

  def column(i, term):
    one = [jnp.zeros_like(y) for y in map(order.flat_part, parts, order.examples)]
    one[term] = one[term].at[i].set(1)
    return order.parts(factor(order.tree(one)))[term]

  def bend(v):
    slope = lambda p: jax.jvp(lambda q: answers(q)[0], (p,), (v,))[1]
    return order.flat(back(joined(jax.jvp(slope, (params,), (v,))[1]))[0])

  vector = jnp.zeros((), predictor.dtype)
  if with_targets:
    vector = order.flat(scaled(_of_targets(likelihood, outputs, [a.targets for a in found])))
  return Residuals(
    vector,
    lambda v: order.flat(back(joined(push(v)))[0]),
    lambda x: pull(order.parts(factor(order.unflat(x))))[0],
    bend,
    column,
    tuple(order.sizes),
  )


def _of_targets(likelihood: Likelihood, outputs: Any, targets: Sequence[Any]) -> Any:
  """r with B r the gradient of minus the log-likelihood, before the weights of rows."""
  if any(x is None for x in targets):
    if any(labelled for _, labelled in likelihood.arrays(outputs)):
      raise ValueError("Gauss-Newton needs predict to return (outputs, targets)")
    given = jax.tree.map(jnp.zeros_like, outputs)
  else:
    given = joined(targets)
  return likelihood.residual(outputs, given)


class _Order:
  """The order of residuals in a vector, for outputs by term with so many examples each."""

  def __init__(self, parts: Sequence[Any], examples: Sequence[int]):
    self._parts, self.examples = parts, examples
    count = lambda part: sum(math.prod(y.shape) for y in jax.tree.leaves(part))
    self.sizes = [count(part) // n for part, n in zip(parts, examples)]

  def parts(self, tree: Any) -> list[Any]:
    """What each term has of a tree like all outputs."""
    own = lambda part: {k: tree[k] for k in part} if isinstance(part, Mapping) else tree
    return [own(part) for part in self._parts]

  def flat_part(self, part: Any, examples: int) -> jax.Array:
    """The outputs of a batch, [outputs of an example, examples]."""
    return jnp.concatenate([y.reshape(examples, -1) for y in jax.tree.leaves(part)], axis=1).T

  def flat(self, tree: Any) -> jax.Array:
    return jnp.concatenate(
      [x.ravel() for x in map(self.flat_part, self.parts(tree), self.examples)]
    )

  def tree(self, matrices: Sequence[jax.Array]) -> Any:
    """The inverse of `flat_part`, of all terms."""

    def one(matrix, part):
      leaves, structure = jax.tree.flatten(part)
      sizes = [y.size // matrix.shape[1] for y in leaves]
      ends = list(itertools.accumulate(sizes))[:-1]
      split = jnp.split(matrix.T, ends, axis=1)
      return structure.unflatten(x.reshape(y.shape) for x, y in zip(split, leaves))

    return joined([one(matrix, part) for matrix, part in zip(matrices, self._parts)])

  def unflat(self, vector: jax.Array) -> Any:
    """The inverse of `flat`."""
    sizes = [n * m for n, m in zip(self.sizes, self.examples)]
    split = jnp.split(vector, list(itertools.accumulate(sizes))[:-1])
    return self.tree([x.reshape(n, m) for x, n, m in zip(split, self.sizes, self.examples)])
