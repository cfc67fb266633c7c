"""Kronecker factors of the Fisher matrix of any JAX function, estimated on one batch.

For a product y = W^T a the Fisher block is approximated by A (x) G, with A the second moment of the
inputs a (a 1 is appended where there is a bias) and G that of the loss gradients with respect to
the outputs y (Martens and Grosse, 2015, Section 3). The rows of all tokens and of all uses of a
matrix are stacked; `statistics` has the conventions.

The loss is taken to be a mean over rows of outputs: over examples for outputs [batch, n], over
examples and tokens for outputs [batch, tokens, n]; with weights, a weighted mean.
"""

from __future__ import annotations  # `help` shows names, not what they stand for

import functools
from typing import Any, Callable, Collection, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp

from mixer_jax.optim import axes
from mixer_jax.optim.curvature import (
  check,
  first_gradient,
  patterns,
  report,
  statistics,
  tagged,
)
from mixer_jax.optim.curvature import estimation as estimation_lib
from mixer_jax.optim.curvature import gram as gram_lib
from mixer_jax.optim.curvature import residuals as residuals_lib
from mixer_jax.optim.curvature.predictor import Predictor, opened, root_weights, sums_of_weights
from mixer_jax.optim.curvature.programs import Programs
from mixer_jax.optim.curvature.residuals import Residuals
from mixer_jax.optim.curvature.traced import Choices, Traced
from mixer_jax.optim.trees import by_path, wide_type

Params = Batch = Any
MAX_FACTOR = 8192


class Curvature:
  """The curvature of a function: which layers it has, and estimates of their Kronecker factors.

  The function is traced once; nothing of it is registered or wrapped, and it may be written in any
  library. It may hold derivatives, as those of physics-informed nets. `print(curvature)` lists the
  layers, and the parameters without one, which take the plain gradient, with the reason.

  Args:
    predict: maps (params, batch) to the outputs [batch, n] or [batch, tokens, n], to (outputs,
      targets) or to (outputs, targets, weights). `estimation="empirical"` needs targets: int
      labels, or floats like the outputs. Weights [batch] or [batch, tokens] (or like "normal"
      outputs) are those of the loss; rows of weight 0 count in no factor. A fourth part, tokens,
      bool [batch, tokens], marks the padding of sequences with one answer each.
    params: the parameters, a pytree of floats, or their shapes.
    batch: an example batch, or its shapes; later batches may have any size.
    likelihood: the predictive distribution of a row of outputs: "categorical" (logits), "normal"
      (means; minus the log-likelihood is the sum of squares, without one half), "bernoulli"
      (logits) or "normal_variance" (a tuple of means and variances). It may also be a `Likelihood`;
      a pair (weight, likelihood), whose loss is the weight times minus the log-likelihood; or, for
      outputs that are a mapping, a mapping of these. Outputs of a mapping may have batches of their
      own, as points inside and on the boundary.
    estimation: targets of the Fisher matrix: "sampled" from the model, "exact" over all classes (up
      to random signs if outputs depend on other examples), or "empirical", the given ones.
    token_averaging: the scale of layers whose weights T rows of an example share: "published" as in
      the K-FAC study's code, whose A (x) G is T times that of "expand" (Eschenhagen et al., 2023).
    norms: "gradient" leaves scales and shifts to the plain gradient, as published; "diagonal"
      divides their gradient by their Fisher diagonal plus damping.
    unpreconditioned: a regular expression, or several, of the paths of parameters that shall have
      no curvature ("^head/").
    max_factor: a factor of more rows is kept as its diagonal (a head of 21,841 classes). It may be
      a mapping of regular expressions of paths to such numbers, None for no limit; the first that
      matches counts.
    in_axes: the axis of examples of the arrays of the batch, as for `jax.vmap`; None for arrays
      that all examples share. None for all of the batch says that the outputs of an example depend
      on the other ones, as through batch statistics; rows of padding that reach other examples then
      count.
    mesh: devices that share the decompositions, a matrix on each; None: every device makes all.
    axis_name: name of the axis, or names, of `pmap` or `shard_map` over which the batch is spread;
      not needed under `jit`.

  Attributes:
    blocks: a `Block` for each layer, and one for each parameter without.
    likelihood: the `Likelihood` that the argument stands for.
    dtype: type of outputs, sums and factors: float64 if a parameter is, else float32.

  Raises:
    ValueError: a prediction does not fit the likelihood, an option does not exist, or the batch
      lacks the axis of examples.

  Example:
    ```python
    import jax
    import jax.numpy as jnp
    from mixer_jax import optim

    params = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
    batch = {"x": jnp.eye(3), "y": jnp.zeros((3, 2))}
    predict = lambda params, batch: (batch["x"] @ params["w"] + params["b"], batch["y"])
    curvature = optim.Curvature(predict, params, batch, likelihood="normal")
    print(curvature)  # one dense layer with factors of 4 and 2 rows

    key = jax.random.key(0)
    loss = lambda params: jnp.square(jnp.subtract(*predict(params, batch))).sum(axis=1).mean()
    value, grads = jax.value_and_grad(loss)(params)
    ```
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
      raise ValueError(
        "mesh and axis_name are both given; inside of shard_map devices share no work"
      )
    self.mesh, self.axis_name = mesh, axis_name
    self._estimation = estimation
    self._published = token_averaging == "published"
    self._shapes = jax.eval_shape(lambda *trees: trees, params, batch)
    self.dtype = wide_type(self._shapes[0])
    self._predictor = Predictor(predict, likelihood, self.dtype)
    self.likelihood = self._predictor.likelihood
    self.names = tuple(by_path(self._shapes[0]))
    for name, x in by_path(self._shapes[0]).items():
      if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
          f"the parameter {name} is {x.dtype}, which has no gradient; leave it out of params"
        )
    listed = patterns.matching("unpreconditioned", unpreconditioned, self.names)
    named = max_factor if isinstance(max_factor, Mapping) else ()
    patterns.matching("max_factor", [p for p in named if p], self.names)
    choices = Choices(norms, listed, max_factor)
    answer = check.prediction(self._predictor, self._shapes, estimation)
    self._has_targets = answer.targets is not None
    self._programs = Programs(self._predictor, self._shapes[0], choices, in_axes, axis_name)
    if not check.fits(self._traced(batch), answer.outputs):
      report.say("predict takes no batch of one example, so curvature takes the batch as a whole")
      self._programs.retrace(None)
    self._compares = False  # shapes come from a program that knows its loss
    if check.are_small_arrays(params, batch):
      self._programs.check(params, batch)
      self._compares = axis_name is None
    self.blocks = self._traced(batch).blocks
    report.warn(self.blocks, max_factor == MAX_FACTOR)

  def __str__(self) -> str:
    return report.table(self.blocks)

  __repr__ = __str__

  def _traced(self, batch: Batch) -> Traced:
    return self._programs.of(batch)

  def row_gradients(self, params: Params, batch: Batch, gradient: Callable[[Any], Any]) -> Any:
    """The gradient of each layer's matrix, [*stacked, d_in, d_out], summed over rows, by name.

    `gradient` maps the outputs to the gradient of a loss. Equal to autodiff's (see `check`).
    """
    return check.row_gradients(self._traced(batch), params, batch, gradient)

  # Estimates.

  def estimate(
    self, params: Params, batch: Batch, rng: Any = None, only: Collection[str] | None = None
  ) -> dict[str, Any]:
    """Estimates the factors of one batch of any size (traceable).

    Args:
      params: the parameters.
      batch: a batch of any size.
      rng: a key for the sampled targets; not needed by other estimations.
      only: names of the blocks that are wanted; None: all.

    Returns:
      A `Kronecker` or `Diagonal` by name of the block, without the "gradient" ones.

    Example:
      After the example of `Curvature`:

      ```python
      factors = curvature.estimate(params, batch, key)
      print(factors[curvature.blocks[0].name].inputs)  # the mean of a a^T, [4, 4]
      ```
    """
    traced, sums = self._statistics(params, batch, rng, {}, only)
    layers = {x.block.name: x for x in traced.layers if x.block.name in sums}
    found = {name: layer.factors(*sums[name], self._published) for name, layer in layers.items()}
    for block in traced.blocks:
      if block.kind == "diagonal" and block.name in sums:
        own, _ = sums[block.name]
        found[block.name] = statistics.diagonal(own["elements"]["squares"])
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
    """Estimates factors as `estimate` does, compiled once for batches of a shape.

    Args:
      params: the parameters.
      batch: a batch of any size.
      rng: a key for the sampled targets.

    Returns:
      A `Kronecker` or `Diagonal` by name of the block, without the "gradient" ones.

    Example:
      After the example of `Curvature`:

      ```python
      for name, factor in curvature.factors(params, batch, key).items():
        print(name, jax.tree.map(jnp.shape, factor))
      ```
    """
    return self._compiled(params, batch, rng)

  def _statistics(self, params, batch, rng, basis, only) -> tuple[Traced, dict[str, Any]]:
    """Each block's sums over rows, and over how many examples, by its name."""
    traced, (params, batch) = self._traced(batch), axes.varying((params, batch), self.axis_name)
    leaves, flat = (list(map(jnp.asarray, jax.tree.leaves(x))) for x in (params, batch))
    zeros = estimation_lib.accumulators(traced, basis, only)
    plain = [term.run(leaves, flat, jnp.ones(term.tokens), {}, {}) for term in traced.terms]
    weights = [self._predictor.weights(answer) for answer in plain]
    if any(counts is not None for _, counts in weights):
      leaves = [opened(x) for x in leaves]
    runs = estimation_lib.forward(traced, leaves, batch, zeros, weights, self.axis_name)
    sums = estimation_lib.sums(runs, self.likelihood, self._estimation, rng, self.axis_name)
    terms = [(own, run.examples) for own, run in zip(sums, runs)]
    if self.axis_name is not None:
      terms = jax.lax.psum(terms, self.axis_name)
    of = lambda name: statistics.of_terms([(own[name], examples) for own, examples in terms])
    return traced, {name: of(name) for name in zeros}

  # Other quantities.

  def outputs(self, params: Params, batch: Batch) -> Any:
    """Returns the outputs of `predict` for a batch, without targets and weights.

    Args:
      params: the parameters.
      batch: a batch of any size.

    Returns:
      Outputs of all examples at once, in the type of the curvature.

    Example:
      After the example of `Curvature`:

      ```python
      assert curvature.outputs(params, batch).shape == (3, 2)
      ```
    """
    return self._predictor.outputs(params, batch)

  def quadratic(self, params: Params, batch: Batch, vectors: Sequence[Any]) -> jax.Array:
    """Returns the products v_i^T F v_j with the exact Gauss-Newton (Fisher) matrix F of a batch.

    F is never formed: with J the derivative of the outputs and B B^T their Fisher matrix, the
    product of v and w is the inner product of B^T J v and B^T J w.

    Args:
      params: the parameters.
      batch: a batch of any size.
      vectors: k trees like params; parameters that one lacks count as zeros.

    Returns:
      The products, [k, k].

    Raises:
      ValueError: the likelihood has no factor.

    Example:
      After the example of `Curvature`:

      ```python
      bend = curvature.quadratic(params, batch, [grads])[0, 0]  # g^T F g, along the gradient g
      ```
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
    flat = [[x.astype(self.dtype) for x in jax.tree.leaves(c)] for c in columns]
    products = jnp.array([[sum(map(jnp.vdot, v, w)) for w in flat] for v in flat])
    return products if self.axis_name is None else jax.lax.psum(products, self.axis_name)

  def residuals(self, params: Params, batch: Batch) -> Residuals:
    """Returns the residuals r [N] of a batch, and products with their derivative J.

    J^T r is the gradient of the loss, J^T J the exact Gauss-Newton (Fisher) matrix. Targets that
    predict does not return are zero, as of residuals of equations.

    Args:
      params: the parameters.
      batch: a batch of any size.

    Returns:
      A `Residuals`.

    Raises:
      ValueError: there are no targets, and the likelihood's are labels.

    Example:
      After the example of `Curvature`:

      ```python
      space = curvature.residuals(params, batch)
      gradient = space.pull(space.vector)  # equals grads
      ```
    """
    return residuals_lib.residuals(self._traced(batch), self._predictor, params, batch)

  def gram(self, params: Params, batch: Batch, only: Collection[str] | None = None) -> jax.Array:
    """Returns J J^T of the residuals of a batch, without forming J.

    Args:
      params: the parameters.
      batch: a batch of any size.
      only: paths of the parameters that count; None: all.

    Returns:
      The matrix, [N, N] for N residuals.

    Example:
      After the example of `Curvature`:

      ```python
      assert curvature.gram(params, batch).shape == (6, 6)  # three examples, two outputs
      ```
    """
    traced = self._traced(batch)
    space = self._space(params, batch)
    names = self.names if only is None else only
    return gram_lib.gram(traced, by_path(params), batch, space, names)

  def jacobian(
    self, params: Params, batch: Batch, only: Collection[str] | None = None
  ) -> jax.Array:
    """Returns the derivative J of the residuals of a batch.

    Args:
      params: the parameters.
      batch: a batch of any size.
      only: paths of the parameters that count; None: all.

    Returns:
      The matrix, [N, P] for N residuals and P numbers in these parameters.

    Example:
      After the example of `Curvature`:

      ```python
      assert curvature.jacobian(params, batch).shape == (6, 8)
      ```
    """
    names = self.names if only is None else only
    space = self._space(params, batch)
    return gram_lib.jacobian(self._traced(batch), by_path(params), batch, space, names)

  def of_columns(
    self, vector: jax.Array, params: Params, batch: Batch, only: Collection[str] | None = None
  ) -> dict[str, jax.Array]:
    """The arrays by path of a vector [P] in the order of the columns of `jacobian`."""
    names = self.names if only is None else only
    return gram_lib.arrays(self._traced(batch), by_path(params), names, vector)

  def products(self, params: Params, batch: Batch) -> Callable[[Any], Any]:
    """Returns a function that multiplies by the exact Gauss-Newton (Fisher) matrix of a batch.

    Args:
      params: the parameters.
      batch: a batch of any size.

    Returns:
      A function from a tree like params to a tree like params.

    Raises:
      ValueError: the likelihood has no factor.

    Example:
      After the example of `Curvature`:

      ```python
      multiply = curvature.products(params, batch)
      curved = multiply(grads)
      ```
    """
    if self.likelihood.factor is None:
      raise ValueError("products with the Fisher matrix need a likelihood with a factor")
    space = self._space(params, batch)
    return lambda vector: self._over_devices(space.pull(space.push(tangent(params, vector))))

  def bent(self, params: Params, batch: Batch, vector: Any) -> Any:
    """J^T times the second derivative of the outputs along a vector, see `residuals.Residuals`."""
    space = self._space(params, batch)
    return self._over_devices(space.pull(space.bend(tangent(params, vector))))

  def _space(self, params, batch) -> Residuals:
    given = self._traced(batch), self._predictor, params, batch, False, self.axis_name
    return residuals_lib.residuals(*given)

  def _over_devices(self, tree: Any) -> Any:
    return tree if self.axis_name is None else jax.lax.psum(tree, self.axis_name)

  def product(self, params: Params, batch: Batch, vector: Any) -> Any:
    """Multiplies one vector by the exact Gauss-Newton (Fisher) matrix of a batch, see `products`.

    Args:
      params: the parameters.
      batch: a batch of any size.
      vector: a tree like params.

    Returns:
      A tree like params.

    Example:
      After the example of `Curvature`:

      ```python
      curved = curvature.product(params, batch, grads)
      ```
    """
    return self.products(params, batch)(vector)

  def tagged(self) -> tagged.Tagged:
    """Returns the function with kfac-jax's registration at each layer, for `kfac_jax.Optimizer`.

    Returns:
      A `Tagged`: predict, and the ways from parameters to its matrices and back.

    Example:
      After the example of `Curvature`:

      ```python
      predict_matrices, enter, leave = curvature.tagged()
      outputs = predict_matrices(enter(params), batch)  # hand a loss of these to kfac_jax.Optimizer
      ```
    """
    return tagged.tagged(self._predictor, self._shapes[0], self._programs.choices, self.blocks)

  def per_example_grads(self, params: Params, batch: Batch, chunk: int = 32) -> Iterator[Any]:
    """Iterates over the gradients of single examples' minus log-likelihoods.

    Args:
      params: the parameters.
      batch: a batch of any size, with targets.
      chunk: most gradients at a time.

    Returns:
      An iterator of trees like params with a leading axis of examples, see `per_example_grads`.

    Example:
      After the example of `Curvature`:

      ```python
      [grads_of_examples] = curvature.per_example_grads(params, batch)
      assert grads_of_examples["w"].shape == (3, 3, 2)
      ```
    """
    from mixer_jax.optim.per_example import per_example_grads

    return per_example_grads(self._loss_of, params, batch, chunk)

  @functools.cached_property
  def _loss_of(self) -> Callable:
    return first_gradient.loss_of(self._predictor)

  def compare(
    self,
    gradients: Any,
    params: Params,
    batch: Batch,
    count: jax.Array,
    scale: bool = False,
    own: Callable[[], Any] | None = None,
  ) -> None:
    """Warns in the first update if a gradient is another one than that of the likelihood's loss.

    As of a `predict` that returns a solution where the loss is of its residual. It needs targets, or
    `own`, which gives the latter. Directions are compared; with `scale`, as a quadratic model needs,
    lengths, too.
    """
    if not self._compares or batch is None or (own is None and not self._has_targets):
      return
    exact = own or (lambda: jax.grad(self._loss_of)(params, batch))
    first_gradient.compare(gradients, exact, count == 0, scale, self.dtype)

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
    layers = self._programs.first().layers
    of = lambda layer: layer.scale(layer.block.tokens) if self._published else 1.0
    return {layer.block.name: rows * of(layer) for layer in layers}

  def common_rows(self, params: Params, batch: Batch) -> tuple[int, ...]:
    """The shape of the rows of all outputs, [batch] or [batch, tokens].

    A ValueError if outputs differ in their rows or weights: each layer may see other ones.
    """
    if self.likelihood.weight is None:
      raise ValueError(
        "second moments of a batch need one weight for the likelihoods of all outputs"
      )
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
      raise ValueError(
        "the update needs batch: tx.update(grads, state, params, batch=batch, rng=rng)"
      )
    if fraction is None or fraction == 1:
      return batch
    if not (0 < fraction < 1 and abs(fraction * (n := round(1 / fraction)) - 1) <= 0.02):
      raise ValueError(f"factor_fraction is {fraction}; allowed: 1/n, such as 1, 0.5, 0.33, 0.25")
    return self._programs.taken(batch, slice(None, None, n))


def tangent(params: Params, vector: Any) -> Any:
  """A vector like all parameters, filled up with zeros."""
  leaves = by_path(vector)
  names = iter(by_path(params))
  return jax.tree.map(lambda p: leaves.get(next(names), jnp.zeros_like(p)).astype(p.dtype), params)
