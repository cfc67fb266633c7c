"""One forward and backward pass of tapped programs: from a batch to sums over rows."""

import functools
import itertools
import math
from typing import Any, Callable, Mapping, NamedTuple, Sequence

import jax
import jax.numpy as jnp

from mixer_jax.optim import axes
from mixer_jax.optim.curvature import program, statistics, taps
from mixer_jax.optim.curvature.likelihoods import Likelihood
from mixer_jax.optim.curvature.predictor import Answer, root_weights
from mixer_jax.optim.curvature.traced import Tap, Traced
from mixer_jax.optim.trees import wide_type


class Run(NamedTuple):
  """A term after its forward pass.

  Attributes:
    answer: its outputs in the type of sums, without gradients, with targets and weights.
    pullback: from the gradient of its outputs to the sums of the accumulators.
    weights: of rows, and whether examples (or, of tokens, rows) count; or two None.
    examples: how many count, on this device.
  """

  answer: Answer
  pullback: Callable[[Any], Any]
  weights: tuple[Any, Any]
  examples: jax.Array


def accumulators(traced: Traced, basis: Mapping[str, Any], only: Any) -> dict[str, Any]:
  """Zeros for the sums of the blocks that `only` names (None: all), with the bases of EK-FAC."""
  zeros = {x.block.name: x.accumulators(basis.get(x.block.name)) for x in traced.layers}
  for block in traced.blocks:
    if block.kind == "diagonal":
      zeros[block.name] = {"elements": {"squares": jnp.zeros(block.shapes[0], block.dtype)}}
  return {name: own for name, own in zeros.items() if only is None or name in only}


def forward(
  traced: Traced,
  leaves: Sequence[Any],
  batch: Any,
  zeros: Mapping[str, Any],
  weights: Sequence[tuple[Any, Any]],
  axis_name: Any = None,
  of_product: Callable = taps.of_product,
) -> list[Run]:
  """Runs all terms; `of_product` is what taps of products add up to the accumulators `zeros`."""
  flat, dtype = list(map(jnp.asarray, jax.tree.leaves(batch))), wide_type(leaves)
  zeros = axes.varying(zeros, axis_name)
  of = lambda names: {n: zeros[n] for n in names if n in zeros}

  def run(term: program.Term, own: Mapping[Any, Tap], weights: tuple[Any, Any]) -> Run:
    counts = weights[1]
    by_example = None if counts is None else _of_examples(counts, term)
    token = jnp.ones(term.tokens) if by_example is None or not term.mapped else by_example
    token = axes.varying(token, axis_name)
    tapped = {p: _tapped(tap, of_product) for p, tap in own.items() if tap.block in zeros}

    def answer(zeros):
      beside = {leaf: {n: zeros[n] for n in of(names)} for leaf, names in traced.owners.items()}
      found = term.run(leaves, flat, token, tapped, beside)
      return jax.tree.map(lambda y: y.astype(dtype), found.outputs), found

    outputs, pullback, found = jax.vjp(answer, zeros, has_aux=True)
    found = found._replace(outputs=jax.lax.stop_gradient(outputs))
    examples = jnp.float32(term.examples) if by_example is None else by_example.sum()
    return Run(found, lambda g: pullback(g)[0], weights, examples)

  return [run(*of_term) for of_term in zip(traced.terms, traced.taps, weights)]


def _tapped(tap: Tap, of_product: Callable) -> Callable:
  sums = tap.elements or functools.partial(of_product, tap.rows)

  def function(token, given, result, accumulators):
    return taps.tapped(sums, given[tap.operand], result, accumulators[tap.block][tap.kind], token)

  return function


def _of_examples(counts: jax.Array, term: program.Term) -> jax.Array:
  """1 for each example of which some row counts, float32."""
  return counts.reshape(term.examples, -1).any(axis=1).astype(jnp.float32)


def joined(parts: Sequence[Any]) -> Any:
  """The mapping of all outputs, of those of each term."""
  return parts[0] if len(parts) == 1 else {k: v for part in parts for k, v in part.items()}


def pull(runs: Sequence[Run], gradient: Any) -> list[Any]:
  """The sums of each term, for the gradient of the outputs of all."""
  part = lambda own: {k: gradient[k] for k in own} if isinstance(own, Mapping) else gradient
  return [run.pullback(part(run.answer.outputs)) for run in runs]


def sums(
  runs: Sequence[Run], likelihood: Likelihood, estimation: str, rng: Any, axis_name: Any
) -> list[Any]:
  """The sums of each term, with gradients of the labels that `estimation` says."""
  rng = jax.random.key(0) if rng is None and estimation == "exact" else rng
  if axis_name is not None and rng is not None:
    rng = jax.random.fold_in(rng, jax.lax.axis_index(axis_name))
  outputs = joined([run.answer.outputs for run in runs])
  scales = joined([root_weights(run.weights[0], run.answer.outputs, axis_name) for run in runs])
  scaled = lambda gradient: pull(runs, jax.tree.map(jnp.multiply, gradient, scales))
  if estimation == "empirical":
    return scaled(likelihood.gradient(outputs, joined([run.answer.targets for run in runs])))
  if estimation == "sampled":
    if rng is None:
      raise ValueError('estimation="sampled" needs the argument rng, a key')
    return scaled(likelihood.gradient(outputs, likelihood.sample(rng, outputs)))
  return _exact(outputs, likelihood, scaled, rng)


def _exact(outputs: Any, likelihood: Likelihood, scaled: Callable, rng: jax.Array) -> list[Any]:
  """One backward pass for each column of the factor of the Fisher matrix of the outputs.

  Random signs of examples cancel, in the mean, products of two that a layer's rows depend on.
  """
  leaves, structure = jax.tree.flatten(outputs)
  sizes, dtype = [math.prod(y.shape[1:]) for y in leaves], leaves[0].dtype

  def column(i):
    parts = jnp.split(jnp.arange(sum(sizes)) == i, list(itertools.accumulate(sizes))[:-1])
    key = jax.random.fold_in(rng, i)
    drawn = lambda n: jax.random.bernoulli(key, jnp.float32(0.5), (n,))
    signs = {n: jnp.where(drawn(n), 1, -1).astype(dtype) for n in {len(y) for y in leaves}}
    signed = lambda p, y: p.reshape(y.shape[1:]) * signs[len(y)].reshape(-1, *(1,) * (y.ndim - 1))
    v = structure.unflatten(map(signed, parts, leaves))
    return scaled(likelihood.factor(outputs, v))

  add = lambda total, i: (jax.tree.map(jnp.add, total, column(i)), None)
  # Inputs and numbers of rows do not depend on the labels: they are summed once. A gradient drawn
  # at random reaches every row that outputs depend on; ones would cancel in outputs z and -z.
  drawn = lambda y, key: jnp.ones_like(y) * jax.random.normal(key, y.shape, y.dtype)
  once = scaled(structure.unflatten(map(drawn, leaves, jax.random.split(rng, len(leaves)))))
  total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, once), jnp.arange(sum(sizes)))
  return [{n: statistics.inputs_once(a[n], b[n]) for n in a} for a, b in zip(once, total)]


def row_gradients(traced: Traced, leaves: Sequence[Any], batch: Any, gradient: Callable) -> Any:
  """The gradient of each layer's matrix, a sum of a d^T over rows, by name of the block.

  `gradient` maps the outputs of the batch to those of a loss.
  """
  zeros = {}
  for layer in traced.layers:
    block, own = layer.block, {}
    own["gradient"] = jnp.zeros((*block.stacked, *block.factor_sizes), block.dtype)
    own["blocks"] = jnp.zeros(block.stacked, block.dtype)
    zeros[block.name] = dict.fromkeys(layer.kinds, own)
  runs = forward(
    traced, leaves, batch, zeros, [(None, None)] * len(traced.terms), None, taps.gradient
  )
  parts = pull(runs, gradient(joined([run.answer.outputs for run in runs])))
  kinds = lambda name: [own["gradient"] for part in parts for own in part[name].values()]
  return {name: sum(kinds(name)) for name in zeros}
