"""Kronecker factors of the Fisher matrix of any JAX function, estimated on one batch.

For a product y = W^T a the Fisher block is approximated by A (x) G, with A the second moment of the
inputs a (a 1 is appended where there is a bias) and G that of the loss gradients with respect to
the outputs y (Martens and Grosse, 2015, Section 3). The rows of all tokens and of all uses of a
matrix are stacked; `statistics` has the conventions.

The loss is taken to be a mean over rows of outputs: over examples for outputs [batch, n], over
examples and tokens for outputs [batch, tokens, n]; with weights, a weighted mean.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any, Callable, Collection, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp

from mixer_jax.optim import axes
from mixer_jax.optim.curvature import layers as layers_lib
from mixer_jax.optim.curvature import patterns, program, report, statistics, taps
from mixer_jax.optim.curvature.blocks import Block
from mixer_jax.optim.curvature.predictor import Predictor, opened, root_weights, sums_of_weights
from mixer_jax.optim.trees import by_path

Params = Batch = Any
MAX_FACTOR = 8192


@dataclasses.dataclass
class _Traced:
  """The programs of batches of some shapes, with their layers and blocks."""

  terms: list[program.Term]
  layers: list[statistics.Layer]
  blocks: tuple[Block, ...]
  taps: list[dict[Any, tuple[str, Callable]]]
  owners: dict[int, list[str]]  # by leaf, the names of the blocks whose kernel it is


class Curvature:
  """The curvature of a function: which layers it has, and estimates of their factors.

  The function is traced once; nothing of it is registered or wrapped, and it may be written in any
  library. It may hold derivatives, as those of physics-informed nets. `print(curvature)` lists the
  layers, and the parameters without one, which take the plain gradient, with the reason.

  Args:
    predict: maps (params, batch) to the outputs [batch, n] or [batch, tokens, n], to (outputs,
      targets) or to (outputs, targets, weights). `estimation="empirical"` needs targets: int labels,
      or floats like the outputs. Weights [batch] or [batch, tokens] (or like "normal" outputs) are
      those of the loss; rows of weight 0 count in no factor. A fourth part, tokens, bool [batch,
      tokens], marks the padding of sequences with one answer each.
    params: the parameters, a pytree of floats, or their shapes.
    batch: an example batch, or its shapes; later batches may have any size.
    likelihood: the predictive distribution of a row of outputs, "categorical" (logits), "normal"
      (means; minus the log-likelihood is the sum of squares, without one half), "bernoulli" (logits)
      or "normal_variance" (a tuple of means and variances); a `Likelihood` of one's own; a pair
      (weight, likelihood), whose loss is the weight times minus the log-likelihood; or, for outputs
      that are a mapping, a mapping of these. Outputs of a mapping may have batches of their own, as
      points inside and on the boundary.
    estimation: targets of the Fisher matrix: "sampled" from the model, "exact" over all classes (up
      to random signs if outputs depend on other examples), or "empirical", the given ones.
    token_averaging: "published" or "expand", see `statistics`.
    norms: "gradient" leaves scales and shifts to the plain gradient, as published; "diagonal"
      divides it by their Fisher diagonal plus damping.
    unpreconditioned: a regular expression, or several, of the paths of parameters that shall have no
      curvature ("^head/").
    max_factor: a factor of more rows is kept as its diagonal (a head of 21,841 classes). Or a mapping
      of regular expressions to such numbers, None for no limit; the first that matches counts.
    in_axes: the axis of examples of the arrays of the batch, as for `jax.vmap`; None for arrays that
      all examples share. None for all of the batch says that the outputs of an example depend on the
      other ones, as through batch statistics.
    mesh: devices that share the decompositions, a matrix on each; None: every device makes all.
    axis_name: name of the axis, or names, of `pmap` or `shard_map` over which the batch is spread;
      not needed under `jit`.

  Attributes:
    blocks: a `Block` for each layer, and one for each parameter without.

  Raises:
    ValueError: a prediction that does not fit the likelihood, an option that does not exist, or a
      batch without the axis of examples.
  """

  def __init__(
    self,
    predict: Callable[[Params, Batch], Any],
    params: Params,
    batch: Batch,
    *,
    likelihood: Any = "categorical",
    estimation: str = "sampled",
    token_averaging: str = "published",
    norms: str = "gradient",
    unpreconditioned: str | Sequence[str] = (),
    max_factor: int | None | Mapping[str, int | None] = MAX_FACTOR,
    in_axes: Any = 0,
    mesh: jax.sharding.Mesh | None = None,
    axis_name: Any = None,
  ):
    patterns.check_choice("estimation", estimation, ("sampled", "exact", "empirical"))
    patterns.check_choice("token_averaging", token_averaging, ("published", "expand"))
    patterns.check_choice("norms", norms, ("gradient", "diagonal"))
    if mesh is not None and axis_name is not None:
      raise ValueError("mesh and axis_name are both given; inside of shard_map devices share no work")
    self.mesh, self.axis_name = mesh, axis_name
    self._predictor = Predictor(predict, likelihood)
    self.likelihood = self._predictor.likelihood
    self._estimation, self._norms = estimation, norms
    self._published = token_averaging == "published"
    self._in_axes, self._traces = in_axes, {}
    self._shapes = jax.eval_shape(lambda *trees: trees, params, batch)
    self.names = tuple(by_path(self._shapes[0]))
    self._unpreconditioned = patterns.matching("unpreconditioned", unpreconditioned, self.names)
    named = max_factor if isinstance(max_factor, Mapping) else ()
    patterns.matching("max_factor", [p for p in named if p], self.names)
    self._max_factor = max_factor
    self._check()
    self.blocks = self._traced(batch).blocks
    report.warn(self.blocks, max_factor == MAX_FACTOR)

  def __str__(self) -> str:
    return report.table(self.blocks)

  __repr__ = __str__

  def _check(self) -> None:
    """Refuses predictions that do not fit the likelihood."""
    answer = jax.eval_shape(self._predictor.answer, *self._shapes)
    self.likelihood.check(answer.outputs)
    if answer.targets is not None:
      self.likelihood.check_targets(answer.outputs, answer.targets)
    if self._estimation == "exact" and self.likelihood.factor is None:
      raise ValueError('estimation="exact" needs a likelihood with a factor')
    if self._estimation == "empirical" and answer.targets is None:
      raise ValueError('estimation="empirical" needs predict to return (outputs, targets)')
    if answer.weights is not None and not isinstance(answer.weights, Mapping):
      self._predictor.weights_shape(answer)

  # The programs.

  def _traced(self, batch: Batch) -> _Traced:
    """The programs of a batch of these shapes; a ValueError if its layers are other ones."""
    leaves, structure = jax.tree.flatten(jax.eval_shape(lambda x: x, batch))
    key = structure, tuple((x.shape, x.dtype) for x in leaves)
    if key not in self._traces:
      new = self._trace(structure.unflatten(leaves))
      first = next(iter(self._traces.values()), new)
      for a, b in zip(first.blocks, new.blocks, strict=True):
        same = lambda x: (x.name, x.kind, x.paths, x.factor_sizes, x.stacked)
        if same(a) != same(b):
          raise ValueError(
            f"with a batch of other shapes {b.name} is {b.kind} {b.factor_sizes}{_why(b)}, not {a.kind}"
            f" {a.factor_sizes}{_why(a)}; give an example batch of the longest sequences"
          )
      self._traces[key] = new
    return self._traces[key]

  def _trace(self, batch: Batch) -> _Traced:
    params = self._shapes[0]
    parts = tuple(self.likelihood.inner or ())
    sizes = [x.size for x in jax.tree.leaves(params)]
    terms = program.terms(self._predictor, params, batch, self._in_axes, parts)
    found, reasons = layers_lib.combined([term.found for term in terms], sizes)
    return self._built(terms, found, reasons)

  def _built(self, terms, found, reasons) -> _Traced:
    leaves = list(by_path(self._shapes[0]).values())
    listed = [patterns.matches(self._unpreconditioned, name) for name in self.names]
    reasons = {leaf: why for leaf, why in reasons.items() if not listed[leaf]}
    reasons |= {leaf: "left out by unpreconditioned" for leaf, out in enumerate(listed) if out}
    kept, taps_of, owners = [], [{} for _ in terms], {}
    names = layers_lib.names(found, self.names)
    weighted = self._counted(terms)
    for name, layer in zip(names, found):
      if listed[layer.kernel.leaf]:
        if layer.bias is not None:
          reasons.setdefault(layer.bias.leaf, "its kernel is left out by unpreconditioned")
        continue
      if layer.bias is not None and listed[layer.bias.leaf]:
        layer.bias = None
      kept.append(self._layer(name, layer, leaves, terms))
      owners.setdefault(layer.kernel.leaf, []).append(name)
      for use, place in layer.uses:
        rows = taps.Rows(
          use.product, place, use.bias is not None and layer.bias is not None, layer.sizes, weighted
        )
        kind = statistics.TRANSPOSED if place.transposed else statistics.USE
        taps_of[use.term][use.path] = _tap(name, kind, use.operand, functools.partial(taps.of_product, rows))
    return self._with_rest(terms, kept, taps_of, owners, reasons, leaves)

  def _with_rest(self, terms, kept, taps_of, owners, reasons, leaves) -> _Traced:
    """The blocks in the order of the parameters, with those that have no layer."""
    of_path: dict[str, list[Block]] = {}
    for layer in kept:
      for path in layer.block.paths:
        of_path.setdefault(path, []).append(layer.block)
    shifts = {u.view.leaf: [] for t in terms for u in t.found.uses if u.product is None}
    for i, (name, leaf) in enumerate(zip(self.names, leaves)):
      if name in of_path:
        continue
      block = Block(name, "gradient", (name,), (leaf.shape,), reason=reasons.get(i, "is not read"))
      if self._norms == "diagonal" and i in shifts and block.reason == "a scale or shift":
        block = Block(name, "diagonal", (name,), (leaf.shape,))
        owners[i] = [name]
        self._tap_elements(terms, i, name, leaf.shape, taps_of)
      of_path[name] = [block]
    blocks = dict.fromkeys(b for name in self.names for b in of_path[name])
    return _Traced(terms, kept, tuple(blocks), taps_of, owners)

  def _tap_elements(self, terms, leaf, name, shape, taps_of) -> None:
    for term, own in zip(terms, taps_of):
      if not term.mapped:
        raise ValueError('norms="diagonal" needs outputs that depend on one example, not in_axes=None')
      for use in term.found.uses:
        if use.product is None and use.view.leaf == leaf:
          view = layers_lib.without_positions(use.view)
          squares = taps.of_elements(view, shape, use.kind == "scale")
          own[use.path] = _tap(name, "squares", use.operand, squares)

  def _layer(self, name, layer, leaves, terms) -> statistics.Layer:
    paths = [self.names[view.leaf] for view in (layer.kernel, layer.bias) if view is not None]
    limit = patterns.limit(self._max_factor, paths)
    wide = [size > limit for size in layer.sizes]
    used = [view for view in (layer.kernel, layer.bias) if view is not None]
    tokens = sum(u.rows / (1 if terms[u.term].mapped else terms[u.term].examples) for u, _ in layer.uses)
    block = Block(
      name,
      "kronecker",
      tuple(paths),
      tuple(leaves[view.leaf].shape for view in used),
      layer.sizes,
      (layer.table or wide[0], wide[1]),
      layer.stacked,
      tuple(map(layers_lib.without_positions, used)),
      "embedding" if layer.table else layer.uses[0][0].kind,
      len(layer.uses),
      max(round(tokens), 1),
    )
    kinds = {statistics.TRANSPOSED if place.transposed else statistics.USE for _, place in layer.uses}
    return statistics.Layer(block, layer.patches, tuple(sorted(kinds)))

  def _counted(self, terms) -> str | None:
    """How rows are told from padding, see `taps.Rows`; None: all count."""
    answers = [term.structure.unflatten(term.program.out_avals) for term in terms]
    if all(a.weights is None and a.tokens is None for a in answers):
      return None
    of_rows = any(a.tokens is not None or jnp.ndim(w) > 1 for a in answers for w in jax.tree.leaves(a.weights))
    return "reached" if of_rows or not all(t.mapped for t in terms) else "examples"

  # Estimates.

  def estimate(
    self, params: Params, batch: Batch, rng: Any = None, only: Collection[str] | None = None
  ) -> dict[str, Any]:
    """Fresh factors of one batch of any size (traceable); `rng` decides the sampled targets.

    `only` names the blocks that are wanted; None: all.

    Returns:
      `Kronecker` or `Diagonal` by name of the block, without the "gradient" ones.
    """
    traced, sums = self._statistics(params, batch, rng, {}, only)
    layers = {x.block.name: x for x in traced.layers if x.block.name in sums}
    found = {name: layer.factors(*sums[name], self._published) for name, layer in layers.items()}
    for block in traced.blocks:
      if block.kind == "diagonal" and block.name in sums:
        own, _ = sums[block.name]
        found[block.name] = statistics.diagonal(own["squares"]["squares"])
    return found

  def second_moments(
    self, params: Params, batch: Batch, rng: Any, basis: dict[str, Any]
  ) -> dict[str, jax.Array]:
    """EK-FAC's second moments of examples, [..., d_in, d_out], by name of the Kronecker block.

    `basis` has pairs of `algebra.Eigen` by these names; `rng` is as for `estimate`.
    """
    traced, sums = self._statistics(params, batch, rng, basis, tuple(basis))
    if not all(term.mapped for term in traced.terms):
      raise ValueError("second moments of examples need outputs that depend on one example each")
    own = {layer.block.name: layer for layer in traced.layers if layer.block.name in basis}
    return {name: layer.squares(*sums[name], self._published) for name, layer in own.items()}

  @functools.cached_property
  def _compiled(self) -> Callable:
    return jax.jit(self.estimate)

  def factors(self, params: Params, batch: Batch, rng: Any = None) -> dict[str, Any]:
    """`estimate`, compiled once for batches of a shape."""
    return self._compiled(params, batch, rng)

  def _statistics(self, params, batch, rng, basis, only) -> tuple[_Traced, dict[str, Any]]:
    """Each block's sums over rows, and over how many examples, by its name."""
    traced = self._traced(batch)
    leaves = list(by_path(params).values())
    flat = list(map(jnp.asarray, jax.tree.leaves(batch)))
    zeros = {layer.block.name: layer.accumulators(basis.get(layer.block.name)) for layer in traced.layers}
    for block in traced.blocks:
      if block.kind == "diagonal":
        zeros[block.name] = {"squares": {"squares": jnp.zeros(block.shapes[0], jnp.float32)}}
    if only is not None:
      zeros = {name: own for name, own in zeros.items() if name in only}
    zeros = axes.varying(zeros, self.axis_name)
    plain = [term.run(leaves, flat, jnp.ones(term.tokens), {}, {}) for term in traced.terms]
    weights = [self._predictor.weights(answer) for answer in plain]
    if any(counts is not None for _, counts in weights):
      leaves = [opened(x) for x in leaves]
    runs = []
    for term, own, (_, counts) in zip(traced.terms, traced.taps, weights):
      runs.append(self._forward(traced, term, own, leaves, flat, zeros, counts))
    sums = self._sums(traced, runs, [w for w, _ in weights], rng)
    per_term = [
      (s, self._examples_of(term, answer, counts))
      for term, s, (answer, _), (_, counts) in zip(traced.terms, sums, runs, weights)
    ]
    if self.axis_name is not None:
      per_term = jax.lax.psum(per_term, self.axis_name)
    names = zeros.keys()
    return traced, {n: statistics.of_terms([(s[n], examples) for s, examples in per_term]) for n in names}

  def _forward(self, traced, term, own, leaves, flat, zeros, counts):
    """The answer of a term, and a function from the gradient of its outputs to the sums."""
    token = jnp.ones(term.tokens) if counts is None or not term.mapped else _of_examples(counts, term)
    token = axes.varying(token, self.axis_name)

    def answer(zeros):
      of = lambda names: {n: zeros[n] for n in names if n in zeros}
      beside = {leaf: of(names) for leaf, names in traced.owners.items()}
      taps = {path: tap for path, (name, tap) in own.items() if name in zeros}
      found = term.run(leaves, flat, token, taps, beside)
      outputs = jax.tree.map(lambda y: y.astype(jnp.float32), found.outputs)
      return outputs, found

    outputs, pullback, found = jax.vjp(answer, zeros, has_aux=True)
    return found._replace(outputs=jax.lax.stop_gradient(outputs)), lambda g: pullback(g)[0]

  def _sums(self, traced, runs, weights, rng) -> list[Any]:
    """The sums of each term, with gradients of the labels that `estimation` says."""
    rng = jax.random.key(0) if rng is None and self._estimation == "exact" else rng
    if self.axis_name is not None and rng is not None:
      rng = jax.random.fold_in(rng, jax.lax.axis_index(self.axis_name))
    answers = [answer for answer, _ in runs]
    outputs = _joined([a.outputs for a in answers])
    scales = [root_weights(w, a.outputs, self.axis_name) for w, a in zip(weights, answers)]

    def pull(gradient):
      parts = [_part(gradient, answer.outputs) for answer in answers]
      scaled = [jax.tree.map(jnp.multiply, g, s) for g, s in zip(parts, scales)]
      return [pullback(g) for g, (_, pullback) in zip(scaled, runs)]

    if self._estimation == "empirical":
      return pull(self.likelihood.gradient(outputs, _joined([a.targets for a in answers])))
    if self._estimation == "sampled":
      if rng is None:
        raise ValueError('estimation="sampled" needs the argument rng, a key')
      return pull(self.likelihood.gradient(outputs, self.likelihood.sample(rng, outputs)))
    return self._exact_sums(traced, outputs, pull, rng)

  def _exact_sums(self, traced, outputs, pull, rng) -> list[Any]:
    """One backward pass for each column of the factor of the Fisher matrix of the outputs.

    Random signs of examples cancel, in the mean, products of two that a layer's rows depend on.
    """
    leaves, structure = jax.tree.flatten(outputs)
    sizes = [math.prod(y.shape[1:]) for y in leaves]
    names = {layer.block.name for layer in traced.layers}

    def column(i):
      parts = jnp.split(jnp.arange(sum(sizes)) == i, list(itertools.accumulate(sizes))[:-1])
      keys = jax.random.fold_in(rng, i)
      signs = {n: jax.random.rademacher(keys, (n,), jnp.float32) for n in {y.shape[0] for y in leaves}}
      signed = lambda p, y: p.reshape(y.shape[1:]) * signs[y.shape[0]].reshape(-1, *(1,) * (y.ndim - 1))
      v = structure.unflatten(map(signed, parts, leaves))
      return pull(self.likelihood.factor(outputs, v))

    add = lambda total, i: (jax.tree.map(jnp.add, total, column(i)), None)
    # Inputs and numbers of rows do not depend on the labels: they are summed once. A gradient drawn
    # at random reaches every row that outputs depend on; ones would cancel in outputs z and -z.
    drawn = lambda y, key: jnp.ones_like(y) * jax.random.normal(key, y.shape, y.dtype)
    once = pull(structure.unflatten(map(drawn, leaves, jax.random.split(rng, len(leaves)))))
    total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, once), jnp.arange(sum(sizes)))
    merge = lambda name, a, b: statistics.inputs_once(a, b) if name in names else b
    return [{n: merge(n, a[n], b[n]) for n in a} for a, b in zip(once, total)]

  def _examples_of(self, term, answer, counts: jax.Array | None) -> jax.Array:
    """The number of examples of a term that count, on this device."""
    if counts is None:
      return jnp.float32(term.examples)
    return (_of_examples(counts, term) if term.mapped else counts.reshape(len(counts), -1).any(1)).sum(
      dtype=jnp.float32
    )

  # Other quantities.

  def outputs(self, params: Params, batch: Batch) -> Any:
    """The outputs in float32, of all examples at once."""
    return self._predictor.outputs(params, batch)

  def quadratic(self, params: Params, batch: Batch, vectors: Sequence[Any]) -> jax.Array:
    """Products v_i^T F v_j with the exact Gauss-Newton (Fisher) matrix F of a batch, [k, k].

    F is never formed: with J the derivative of the outputs and B B^T their Fisher matrix, the product
    of v and w is the inner product of B^T J v and B^T J w. Vectors are trees like params; parameters
    that one lacks count as zeros.
    """
    if self.likelihood.factor is None:
      raise ValueError("the quadratic model needs a likelihood with a factor")
    products = axes.automatic(self._quadratic, (params, batch))
    return products(params, batch, vectors)

  def _quadratic(self, params, batch, vectors):
    answer = self._predictor.answer(params, batch)
    outputs, push = jax.linearize(lambda p: self.outputs(p, batch), params)
    scales = root_weights(self._predictor.weights(answer)[0], outputs, self.axis_name)
    pull = jax.linear_transpose(functools.partial(self.likelihood.factor, outputs), outputs)
    forward = lambda v: jax.tree.map(jnp.multiply, push(tangent(params, v)), scales)
    columns = [pull(forward(v))[0] for v in vectors]
    flat = [[x.astype(jnp.float32) for x in jax.tree.leaves(c)] for c in columns]
    products = jnp.array([[sum(map(jnp.vdot, v, w)) for w in flat] for v in flat])
    return products if self.axis_name is None else jax.lax.psum(products, self.axis_name)

  def per_example_grads(self, params: Params, batch: Batch, chunk: int = 32) -> Iterator[Any]:
    """The gradient of each example's minus log-likelihood, a `chunk` at a time; see the function."""
    from mixer_jax.optim.per_example import per_example_grads

    return per_example_grads(self._loss_of, params, batch, chunk)

  @functools.cached_property
  def _loss_of(self) -> Callable:
    """A function whose gradient is that of the likelihood's loss; its value is not the loss's."""

    def loss(params, batch):
      answer = self._predictor.answer(params, batch)
      if answer.targets is None:
        raise ValueError("per_example_grads needs predict to return (outputs, targets)")
      outputs = jax.tree.map(lambda y: y.astype(jnp.float32), answer.outputs)
      gradient = jax.lax.stop_gradient(self.likelihood.gradient(outputs, answer.targets))
      scales = root_weights(self._predictor.weights(answer)[0], outputs, None)
      terms = jax.tree.map(lambda y, g, s: jnp.sum(y * g * s**2), outputs, gradient, scales)
      return sum(jax.tree.leaves(terms))

    return loss

  def moment_scales(self, params: Params, batch: Batch) -> dict[str, jax.Array]:
    """Factors that make squares of the batch's gradient second moments, by Kronecker block.

    The gradient c sum w g / sum w of independent rows with weights w has the mean square
    c^2 E[g^2] sum w^2 / (sum w)^2, and the Fisher matrix c E[g^2]. For errors see `common_rows`.
    """
    shape, c = self.common_rows(params, batch), self.likelihood.weight
    axes.check_distinct(self.axis_name)
    answer = self._predictor.answer(params, batch)
    total, squares = sums_of_weights(self._predictor.weights(answer)[0], shape)
    if self.axis_name is not None:
      total, squares = jax.lax.psum((total, squares), self.axis_name)
    rows = total**2 / jnp.maximum(c * squares, 1e-30)
    layers = next(iter(self._traces.values())).layers
    of = lambda layer: layer.scale(layer.block.tokens) if self._published else 1.0
    return {layer.block.name: rows * of(layer) for layer in layers}

  def common_rows(self, params: Params, batch: Batch) -> tuple[int, ...]:
    """The shape of the rows of all outputs, [batch] or [batch, tokens].

    A ValueError if outputs differ in their rows or weights: each layer may see other ones.
    """
    if self.likelihood.weight is None:
      raise ValueError("second moments of a batch need one weight for the likelihoods of all outputs")
    outputs = jax.tree.leaves(jax.eval_shape(self.outputs, params, batch))
    first, *others = {y.shape[:-1]: None for y in outputs}
    if others:
      raise ValueError(
        f"second moments of a batch need outputs of equally many rows; they have {first}, {others[0]}"
      )
    return first

  def check_common_rows(self) -> None:
    """Raises a ValueError if outputs differ in their rows, see `common_rows`."""
    self.common_rows(*self._shapes)

  def some_of(self, batch: Batch, fraction: float | None) -> Batch:
    """Every n-th example of a batch, n = 1 / fraction; None: all.

    A stride, not a slice, so that devices which share a batch keep equal parts.
    """
    if batch is None:
      raise ValueError("the update needs batch: tx.update(grads, state, params, batch=batch, rng=rng)")
    if fraction is None or fraction == 1:
      return batch
    if not (0 < fraction < 1 and abs(fraction * (n := round(1 / fraction)) - 1) <= 0.02):
      raise ValueError(f"factor_fraction is {fraction}; allowed: 1/n, such as 1, 0.5, 0.33, 0.25")
    leaves, structure = jax.tree.flatten(batch)
    cut = lambda x, a: x if a is None else x[(slice(None),) * a + (slice(None, None, n),)]
    return structure.unflatten(map(cut, leaves, program.axes_of(batch, self._in_axes)))


def tangent(params: Params, vector: Any) -> Any:
  """A vector like all parameters, filled up with zeros."""
  leaves = by_path(vector)
  names = iter(by_path(params))
  return jax.tree.map(lambda p: leaves.get(next(names), jnp.zeros_like(p)).astype(p.dtype), params)


def _tap(name: str, kind: str, operand: int | None, sums: Callable) -> tuple[str, Callable]:
  """The name of a block, and a tap of its accumulators, see `rewrite`."""

  def tap(token, given, result, accumulators):
    return taps.tapped(sums, given[operand], result, accumulators[name][kind], token)

  return name, tap


def _of_examples(counts: jax.Array, term: program.Term) -> jax.Array:
  """1 for each example of which some row counts, float32."""
  return counts.reshape(term.examples, -1).any(axis=1).astype(jnp.float32)


def _joined(parts: list[Any]) -> Any:
  """The mapping of all outputs, of those of each term."""
  return parts[0] if len(parts) == 1 else {k: v for part in parts for k, v in part.items()}


def _part(whole: Any, own: Any) -> Any:
  return {k: whole[k] for k in own} if isinstance(own, Mapping) else whole


def _why(block: Block) -> str:
  return f" ({block.reason})" if block.reason else ""


