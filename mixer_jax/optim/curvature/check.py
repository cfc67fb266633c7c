"""Checks of a function, and of what was found in its program: each layer's gradient is autodiff's."""

from typing import Any, Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mixer_jax.optim.curvature import estimation
from mixer_jax.optim.curvature.blocks import Block
from mixer_jax.optim.curvature.predictor import Answer, Predictor
from mixer_jax.optim.curvature.traced import Traced
from mixer_jax.optim.trees import by_path

EXAMPLES = 2  # so many show whether examples mix
_LARGEST = 20_000_000  # parameters
# A gradient that is shorter than this part of the longest one consists of rounding errors, as before
# a normalisation of two numbers: errors are parts of at least so much.
_VANISHING = 1e-4


def prediction(predictor: Predictor, shapes: tuple[Any, Any], targets: str) -> Answer:
  """The shapes of an answer; a ValueError if it does not fit the likelihood, or the targets of the Fisher matrix."""
  answer = jax.eval_shape(predictor.answer, *shapes)
  likelihood = predictor.likelihood
  likelihood.check(answer.outputs)
  if answer.targets is not None:
    likelihood.check_targets(answer.outputs, answer.targets)
  if targets == "exact" and likelihood.factor is None:
    raise ValueError('estimation="exact" needs a likelihood with a factor')
  if targets == "empirical" and answer.targets is None:
    raise ValueError('estimation="empirical" needs predict to return (outputs, targets)')
  if answer.weights is not None and not isinstance(answer.weights, Mapping):
    predictor.weights_shape(answer)
  return answer


def fits(traced: Traced, outputs: Any) -> bool:
  """Whether what examples have apart is as large as the outputs of all of them."""

  def whole(term):
    rows = term.examples if term.mapped else 1
    grown = lambda y: jax.ShapeDtypeStruct((rows * y.shape[0], *y.shape[1:]), y.dtype)
    return jax.tree.map(grown, term.structure.unflatten(term.program.out_avals).outputs)

  shapes = lambda tree: [y.shape for y in jax.tree.leaves(tree)]
  return shapes(estimation.joined([*map(whole, traced.terms)])) == shapes(outputs)


def same_blocks(first: Sequence[Block], new: Sequence[Block]) -> None:
  """A ValueError if a batch of other shapes has other blocks."""
  same = lambda x: (x.name, x.kind, x.paths, x.factor_sizes, x.stacked)
  why = lambda block: f" ({block.reason})" if block.reason else ""
  for a, b in zip(first, new):
    if same(a) != same(b):
      raise ValueError(
        f"with a batch of other shapes {b.name} is {b.kind} {b.factor_sizes}{why(b)}, not {a.kind}"
        f" {a.factor_sizes}{why(a)}; give an example batch of the longest sequences"
      )


def are_small_arrays(params: Any, batch: Any) -> bool:
  """Whether a check costs little: arrays, not shapes or tracers, and not too many parameters.

  While a program is traced nothing is computed, whatever arrays are given.
  """
  leaves = [jnp.zeros(()), *jax.tree.leaves((params, batch))]
  concrete = all(
    isinstance(x, jax.Array | np.ndarray) and not isinstance(x, jax.core.Tracer) for x in leaves
  )
  return concrete and sum(x.size for x in jax.tree.leaves(params)) <= _LARGEST


def failing(programs: Any, params: Any, batch: Any) -> list[str]:
  """The kernels of the layers whose gradients are not autodiff's."""
  found, traced = errors(programs, params, batch), programs.of(batch)
  narrow = any(term.found.narrow for term in traced.terms)
  narrow |= any(x.dtype.itemsize <= 2 for x in jax.tree.leaves(params))
  bound = 0.1 if narrow else 1e-3
  kernels = {block.name: block.paths[0] for block in traced.blocks}
  return [kernels[name] for name, error in found.items() if error > bound]


def row_gradients(
  traced: Traced, params: Any, batch: Any, gradient: Callable[[Any], Any]
) -> dict[str, jax.Array]:
  """See `Curvature.row_gradients`."""
  found = estimation.row_gradients(traced, jax.tree.leaves(params), batch, gradient)
  read = matrices(traced, jax.tree.map(jnp.ones_like, params))  # 0 where a mask hides an element
  return {name: own * read[name] for name, own in found.items()}


def matrices(traced: Traced, tree: Any) -> dict[str, jax.Array]:
  """The matrices [*stacked, d_in, d_out] of the layers in a tree like params, by name."""
  leaves, own = by_path(tree), [layer.block for layer in traced.layers]
  return {b.name: b.matrix([leaves[path].astype(b.dtype) for path in b.paths]) for b in own}


def errors(programs: Any, params: Any, batch: Any) -> dict[str, jax.Array]:
  """The relative error of each layer's gradient sum a g^T, over all rows of all uses, by its name.

  The loss is the inner product of the outputs of a few examples with numbers drawn at random. Autodiff
  differentiates the function of all of them at once: where examples mix, the gradients differ.
  """
  small = programs.taken(batch, slice(EXAMPLES))

  def loss(params, small):
    leaves = jax.tree.leaves(programs.predictor.outputs(params, small))
    return sum(jnp.vdot(y, _drawn(i, y)) for i, y in enumerate(leaves))

  def compared(params, small):
    traced = programs.of(small)
    exact = matrices(traced, jax.grad(loss)(params, small))
    found = row_gradients(traced, params, small, _like_drawn)
    norm = lambda x: jnp.linalg.norm(x.ravel())
    sizes = {name: jnp.maximum(norm(own), norm(found[name])) for name, own in exact.items()}
    least = _VANISHING * jnp.max(jnp.stack([0.0, *sizes.values()]))
    over = {name: jnp.maximum(size, least) for name, size in sizes.items()}
    error = lambda name: norm(found[name] - exact[name]) / jnp.where(over[name], over[name], 1.0)
    return {name: error(name) for name in exact}

  # It runs once: a program that is compiled sooner is better than a fast one.
  options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
  with jax.default_matmul_precision("highest"):
    try:
      return jax.jit(compared, compiler_options=options)(params, small)
    except Exception as e:
      e.add_note(
        f"This happened in a check of predict with the first {EXAMPLES} examples of the batch. Arrays that"
        " all examples share are named by in_axes, as for jax.vmap."
      )
      raise


def _drawn(i: int, y: jax.Array) -> jax.Array:
  return jax.random.normal(jax.random.key(i), y.shape, jnp.float32).astype(y.dtype)


def _like_drawn(outputs: Any) -> Any:
  leaves, structure = jax.tree.flatten(outputs)
  return structure.unflatten(_drawn(i, y) for i, y in enumerate(leaves))
