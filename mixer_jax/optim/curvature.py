"""Kronecker factors of the Fisher matrix of any Linen model, estimated on one batch.

For a dense layer y = W^T a the Fisher block is approximated by A (x) G, with
A the second moment of the inputs a (a 1 is appended where there is a bias) and
G that of the loss gradients with respect to the outputs y (Martens and Grosse,
2015, Section 3). Layers whose weights are shared over T tokens (all of a
Mixer's) stack the rows of all tokens, and a layer that is used several times the rows of all
uses; with B examples, sums over rows and d = d loss of one example / d y:

  token_averaging  A                    G                 used by
  "published"      sum a a^T / (B T)    T/B sum d d^T     the K-FAC study's code
  "expand"         sum a a^T / (B T)    1/B sum d d^T     kfac-jax (its product),
                                                          Eschenhagen et al., 2023

The published code treats convolutions (its patch embedding) apart: there
A = sum a a^T / (B T^2), so that its product equals that of "expand".

The loss is taken to be a mean over rows of outputs: over examples for outputs [batch, n], over
examples and tokens for outputs [batch, tokens, n]; with weights, a weighted mean.
"""

import functools
import itertools
import math
from typing import Any, Callable, Sequence

import jax
import jax.numpy as jnp

from mixer_jax.optim import axes, capture, companions, layer_calls, layer_views, places, statistics
from mixer_jax.optim.block_trees import by_path, check_params
from mixer_jax.optim.curvature_blocks import Block
from mixer_jax.optim.curvature_options import MAX_FACTOR, check_choice, matches, matching
from mixer_jax.optim.predictor import Predictor, opened, root_weights, sums_of_weights

Params = Batch = Any


class Curvature:
  """Which block each parameter has, and fresh estimates of their factors.

  Args: see `preconditioner.scale_by_kfac`.

  Raises:
    ValueError: an unknown option, a prediction that does not fit the likelihood, or a
      parameter without a block.
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
    plain: str | Sequence[str] = (),
    max_factor: int = MAX_FACTOR,
    full_factors: str | Sequence[str] = (),
    axis_name: Any = None,
  ):
    check_choice("estimation", estimation)
    check_choice("token_averaging", token_averaging)
    check_choice("norms", norms)
    check_params(params)
    self._predictor = Predictor(predict, likelihood)
    self._outputs, self._likelihood = self._predictor.outputs, self._predictor.likelihood
    self._estimation, self._axis_name = estimation, axis_name
    self._published = token_averaging == "published"
    shapes = jax.eval_shape(lambda *trees: trees, params, batch)
    self._check(*shapes)
    self._leaves = by_path(shapes[0])
    self.names = tuple(self._leaves)
    patterns = matching("plain", plain, self.names)
    full = matching("full_factors", full_factors, self.names)
    self._examples = jax.tree.leaves(jax.eval_shape(self._outputs, *shapes))[0].shape[0]
    calls = self._placed_calls(shapes, patterns)
    self._layers = statistics.layers_of(calls, patterns, norms, max_factor, full)
    shared = [
      layer.block for layer in self._layers.values() if places.NOWHERE in layer.example_places
    ]
    if shared and estimation != "sampled":
      raise ValueError(
        f"{shared[0]} has rows without the batch axis, which needs sampled labels, not"
        f" estimation={estimation!r}; broadcast its input to the batch"
      )
    self.blocks = self._list_blocks(shapes, calls, patterns)

  def _placed_calls(self, shapes, patterns) -> list[layer_calls.Call]:
    """All calls of layers; without plain ones where the model refuses companions beside these."""
    try:
      return places.placed(self._outputs, *shapes, self._examples)
    except ValueError:
      listed = functools.partial(matches, patterns)
      if not (skipped := layer_calls.paths_of(shapes[0], listed)):
        raise
      return places.placed(self._outputs, *shapes, self._examples, skipped)

  def _check(self, params: Params, batch: Batch) -> None:
    """Refuses predictions that do not fit the likelihood."""
    answer = jax.eval_shape(self._predictor.answer, params, batch)
    self._likelihood.check(answer.outputs)
    if self._estimation == "exact" and self._likelihood.factor is None:
      raise ValueError('estimation="exact" needs a likelihood with a factor')
    sizes = sorted({x.shape[0] for x in jax.tree.leaves(answer.outputs)})
    if self._estimation == "exact" and len(sizes) > 1:
      raise ValueError(f'estimation="exact" needs outputs of one length; they have {sizes}')
    if self._estimation == "empirical" and answer.targets is None:
      raise ValueError('estimation="empirical" needs predict to return (outputs, targets)')
    aux = lambda p, b: [
      x
      for x in jax.tree.leaves(self._predictor.answer(p, b)[1:])
      if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    if layer_calls.depends(aux, params, batch, lambda name: True, set()):
      raise ValueError(
        "the second part of the prediction depends on the parameters, so it is no targets;"
        ' for means and variances use likelihood="normal_variance", for several outputs a mapping'
      )
    if answer.weights is not None:
      self._predictor.weights_shape(answer)

  def _list_blocks(self, shapes, calls, patterns) -> tuple[Block, ...]:
    """A `Block` for each layer, and one for each parameter that has no curvature."""
    leaves = self._leaves
    blocks = {
      name: block
      for layer in self._layers.values()
      for block in [self._block(layer)]
      for name in block.paths
    }
    covered = {path for block in blocks.values() for path in block.paths}
    if leaking := self._leaking(shapes, covered):
      raise ValueError(
        f"the parameters {', '.join(leaking)} are also used outside of their layers, or in a"
        " jax.custom_vjp, which K-FAC cannot see; list them in `plain` to train them without curvature"
      )
    listed = functools.partial(matches, patterns)
    views = {}
    for call in calls:
      for name in call.shapes:
        views[companions.joined(call.path, name)] = call.view
    free = [name for name in leaves if name not in covered]
    wanted = lambda view: isinstance(view, layer_views.ScaleAndShift) or view == layer_views.Plain()
    unknown = [n for n in free if not listed(n) and not wanted(views.get(n))]
    used = lambda name: layer_calls.depends(self._outputs, *shapes, lambda n: n == name, set())
    if not blocks and not layer_calls.depends(self._outputs, *shapes, lambda n: True, set()):
      raise ValueError(
        "the outputs of predict do not depend on params; allowed: a function of them"
      )
    if unknown := [name for name in unknown if used(name)]:
      raise ValueError(_uncovered(unknown, views))
    for name in free:
      layer = name.rpartition("/")[0]
      own = tuple(n for n in free if n.rpartition("/")[0] == layer) if layer else (name,)
      shapes_of = tuple(leaves[n].shape for n in own)
      blocks[name] = Block(layer or name, "gradient", own, shapes_of)
    return tuple(dict.fromkeys(blocks[name] for name in leaves))

  def _leaking(self, shapes, covered: set[str]) -> list[str]:
    held = set(self._layers)
    depends = lambda chosen: layer_calls.depends(self._outputs, *shapes, chosen, held)
    if not depends(covered.__contains__):
      return []
    return [name for name in sorted(covered) if depends(lambda n, name=name: n == name)]

  def _block(self, layer: statistics.Layer) -> Block:
    full = tuple(self._leaves[name].shape for name in layer.names)
    name = layer.block
    if isinstance(layer.call.view, layer_views.ScaleAndShift):
      return Block(name, "diagonal", layer.names, full, stacked=layer.stacked)
    sizes = tuple(shape[0] for shape in (layer.sums["inputs"], layer.sums["outputs"]))
    diagonal = tuple(len(layer.sums[side]) == 1 for side in ("inputs", "outputs"))
    rest = diagonal, layer.stacked, layer.call.view.axes
    tokens = max(int(layer.tokens(self._examples)), 1)
    return Block(name, "kronecker", layer.names, full, sizes, tokens, *rest)

  def estimate(self, params: Params, batch: Batch, rng: Any = None) -> dict[str, Any]:
    """Fresh factors of one batch of any size (traceable); `rng` decides the sampled targets.

    Returns:
      `Kronecker` or `Diagonal` by name of the block, without the "gradient" ones.
    """
    layers = self._statistics(params, batch, rng, {})
    return {layer.block: layer.factors(sums, uses, self._published) for layer, sums, uses in layers}

  def second_moments(
    self, params: Params, batch: Batch, rng: Any, basis: dict[str, Any]
  ) -> dict[str, jax.Array]:
    """EK-FAC's second moments of examples, [..., d_in, d_out], by name of the Kronecker block.

    `basis` has pairs of `algebra.Eigen` by these names; `rng` is as for `estimate`.
    """
    layers = self._statistics(params, batch, rng, basis)
    return {
      layer.block: layer.squares(sums, uses, self._published)
      for layer, sums, uses in layers
      if layer.block in basis
    }

  def _statistics(self, params, batch, rng, basis) -> list[tuple[statistics.Layer, Any, jax.Array]]:
    """Each layer with its sums over rows, and over how many examples (of a shared one: devices)."""
    weights, counts = self._predictor.weights(params, batch)
    size = jax.tree.leaves(jax.eval_shape(self._outputs, params, batch))[0].shape[0]
    rows = self._predictor.rows(params, batch)
    zeros = {
      path: layer.companions(rows, basis.get(layer.block), size)
      for path, layer in self._layers.items()
    }
    zeros = axes.varying(zeros, self._axis_name)
    if rows is not None:
      params = jax.tree.map(opened, params)
    outputs, targets, pullback = capture.sums(self._answer, params, zeros, batch)
    outputs = jax.lax.stop_gradient(outputs)
    examples = self._examples_of(outputs, counts)
    scales = root_weights(weights, outputs, self._axis_name)
    sums = self._sums(outputs, targets, pullback, scales, rng)
    if self._axis_name is not None:
      sums = jax.lax.psum(sums, self._axis_name)
    # The rows of a shared layer are those of one example on each device.
    devices = 1.0 if self._axis_name is None else jax.lax.psum(1.0, self._axis_name)
    uses = lambda layer: devices if layer.shared else examples
    return [(layer, sums[path], uses(layer)) for path, layer in self._layers.items()]

  def _answer(self, params: Params, batch: Batch) -> tuple[Any, Any]:
    answer = self._predictor.answer(params, batch)
    return jax.tree.map(lambda y: y.astype(jnp.float32), answer.outputs), answer.targets

  def _examples_of(self, outputs: Any, counts: jax.Array | None) -> jax.Array:
    """The number of examples that count, on all devices."""
    first = jax.tree.leaves(outputs)[0]
    counted = (
      jnp.ones(first.shape[0], jnp.float32)
      if counts is None
      else counts.reshape(len(counts), -1).any(1)
    )
    examples = counted.sum(dtype=jnp.float32)
    return examples if self._axis_name is None else jax.lax.psum(examples, self._axis_name)

  def moment_scales(self, params: Params, batch: Batch) -> dict[str, jax.Array]:
    """Factors that make squares of the batch's gradient second moments, by Kronecker block.

    The gradient c sum w g / sum w of independent rows with weights w has the mean square
    c^2 E[g^2] sum w^2 / (sum w)^2, and the Fisher matrix c E[g^2]. For errors see `common_rows`.
    """
    shape, c = self.common_rows(params, batch), self._likelihood.weight
    axes.check_distinct(self._axis_name)
    total, squares = sums_of_weights(self._predictor.weights(params, batch)[0], shape)
    if self._axis_name is not None:
      total, squares = jax.lax.psum((total, squares), self._axis_name)
    rows = total**2 / jnp.maximum(c * squares, 1e-30)
    layers = {layer.block: layer for layer in self._layers.values()}
    of = lambda layer: layer.scale(layer.tokens(self._examples)) if self._published else 1.0
    return {b.name: rows * of(layers[b.name]) for b in self.blocks if b.kind == "kronecker"}

  def common_rows(self, params: Params, batch: Batch) -> tuple[int, ...]:
    """The shape of the rows of all outputs, [batch] or [batch, tokens].

    A ValueError if outputs differ in their rows or weights: each layer may see other ones.
    """
    if self._likelihood.weight is None:
      raise ValueError('eigenvalues="batch" needs one weight for the likelihoods of all outputs')
    outputs = jax.tree.leaves(jax.eval_shape(self._outputs, params, batch))
    first, *others = {y.shape[:-1]: None for y in outputs}
    if others:
      raise ValueError(
        f'eigenvalues="batch" needs outputs of equally many rows; they have {first} and {others[0]}'
      )
    return first

  def _sums(self, outputs, targets, pullback, scales, rng) -> Any:
    """The sums over rows, with gradients of the labels that `estimation` says."""
    rng = jax.random.key(0) if rng is None and self._estimation == "exact" else rng
    if self._axis_name is not None and rng is not None:
      rng = jax.random.fold_in(rng, jax.lax.axis_index(self._axis_name))
    pull = lambda gradient: pullback(jax.tree.map(jnp.multiply, gradient, scales))
    if self._estimation == "empirical":
      return pull(self._likelihood.gradient(outputs, targets))
    if self._estimation == "sampled":
      if rng is None:
        raise ValueError('estimation="sampled" needs the argument rng, a key')
      return pull(self._likelihood.gradient(outputs, self._likelihood.sample(rng, outputs)))
    # One backward pass for each column of the factor of the Fisher matrix of the outputs. Random
    # signs of examples cancel, in the mean, products of two that a layer's rows depend on.
    leaves, structure = jax.tree.flatten(outputs)
    sizes = [math.prod(y.shape[1:]) for y in leaves]

    def column(i):
      parts = jnp.split(jnp.arange(sum(sizes)) == i, list(itertools.accumulate(sizes))[:-1])
      signs = jax.random.rademacher(jax.random.fold_in(rng, i), leaves[0].shape[:1], jnp.float32)
      signed = lambda p, y: p.reshape(y.shape[1:]) * signs.reshape(-1, *(1,) * (y.ndim - 1))
      v = structure.unflatten(map(signed, parts, leaves))
      return pull(self._likelihood.factor(outputs, v))

    add = lambda total, i: (jax.tree.map(jnp.add, total, column(i)), None)
    # Inputs and numbers of rows do not depend on the labels: they are summed once. A gradient drawn
    # at random reaches every row that outputs depend on; ones would cancel in outputs z and -z.
    drawn = lambda y, key: jnp.ones_like(y) * jax.random.normal(key, y.shape, y.dtype)
    once = pull(structure.unflatten(map(drawn, leaves, jax.random.split(rng, len(leaves)))))
    zeros = jax.tree.map(jnp.zeros_like, once)
    total, _ = jax.lax.scan(add, zeros, jnp.arange(sum(sizes)))
    return {path: statistics.inputs_once(once[path], total[path]) for path in once}


def _uncovered(names: Sequence[str], views: dict[str, layer_views.View]) -> str:
  """The line about parameters that no block covers; `views` are those of layers, by parameter."""
  if not views:
    return (
      "predict calls no layer of Flax Linen with params, and K-FAC sees layers alone: write the"
      " model in Linen, or take soap, shampoo or muon, which need no layers"
    )
  reasons = {views[n].reason for n in names if isinstance(views.get(n), layer_views.Plain)}
  why = f" ({', '.join(sorted(reasons))})" if reasons else ""
  return (
    f"no K-FAC block covers the parameters {', '.join(names)}{why}: list them in `plain` to train"
    " them without curvature, or let their layer say by its attribute `curvature` how it uses them"
    f" ({', '.join(layer_views.DECLARED)})"
  )
