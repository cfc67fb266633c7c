"""The curvature of a model, made once and on demand: all but K-FAC runs without kfac-jax."""

import functools
from importlib import metadata
import logging
import os
import types
from typing import Any, Callable, Mapping

from flax.core import FrozenDict
import jax
import jax.numpy as jnp
import numpy as np

from mixer_jax.optim import algebra
from mixer_jax.optim.curvature_blocks import Diagonal, Diagonals, Kronecker
from mixer_jax.optim.curvature_options import MAX_FACTOR
from mixer_jax.runtime.imports import without

_UNSTACKED: Mapping[str, int] = types.MappingProxyType({})


def kfac_blocks(predict: Callable, params: Any, batch: Any, **options: Any):
  """The tuple of `curvature_blocks.Block` that `scale_by_kfac` of these arguments uses."""
  return curvature_of(predict, params, batch, **options).blocks


def kfac_factors(predict: Callable, params: Any, batch: Any, rng: jax.Array, **options: Any):
  """Estimates the factors of one batch, without any average over steps.

  `rng` is a key for sampled targets; options are those of `scale_by_kfac` that concern the
  curvature: likelihood, estimation, token_averaging, norms, plain, max_factor,
  full_factors, axis_name. The function is compiled once for a `predict`: hand arrays that change to
  it in `params` or `batch`, not by a closure.

  Returns:
    By layer, `Kronecker`: A [d_in + 1, d_in + 1] (with a bias) and G [d_out, d_out]; or
    `Diagonal`.
  """
  return _estimator(curvature_of(predict, params, batch, **options))(params, batch, rng)


@functools.lru_cache(maxsize=4)
def _estimator(curvature):
  return jax.jit(curvature.estimate)


def every_nth(batch: Any, n: int) -> Any:
  """Every n-th example of a batch; all of its arrays have the examples first.

  A stride, not a slice, so that devices which share a batch keep equal parts.
  """
  sizes = {getattr(x, "shape", ())[:1] for x in jax.tree.leaves(batch)}
  if len(sizes) != 1 or () in sizes:
    raise ValueError(
      "factor_fraction needs a batch whose arrays all have the examples first; theirs have leading"
      f" sizes {', '.join(sorted(str(s[0]) if s else 'none' for s in sizes))}: pass `part`"
    )
  return jax.tree.map(lambda x: x[::n], batch)


def some_of(batch: Any, fraction: float | None, part: Callable | None) -> Any:
  """The part of a batch that factors are estimated from; `part` is `every_nth` by default."""
  if batch is None:
    raise ValueError(
      "the update needs batch: tx.update(grads, state, params, batch=batch, rng=rng)"
    )
  # Arrays of NumPy that `jit` closes over are constants without the methods of JAX's.
  batch = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, batch)
  if fraction is None or fraction == 1:
    return batch
  return (part or every_nth)(batch, round(1 / fraction))


def averaged(
  old: dict[str, Any],
  fresh: dict[str, Any],
  renewals: jax.Array,
  decay: Any,
  identity_start: Any,
  stacked: Mapping[str, int] = _UNSTACKED,
) -> dict[str, Any]:
  """The moving averages of factors after one more estimate.

  Args:
    old: by name of the block.
    fresh: the estimate.
    renewals: how many there were before.
    decay: weight of the old average.
    identity_start: False: the old average of no estimates has no weight, that of a layer which saw
      only padding so far included.
    stacked: leading axes of a `Diagonal` over layers, by name.
  """
  # The weight of the newest of n + 1 estimates is (1 - decay) / (1 - decay^(n + 1)). Of the first
  # it must be 1 exactly, which the quotient is not: some of the identity would stay.
  log = jnp.log(jnp.float32(decay))
  quotient = jnp.expm1(log) / jnp.expm1((renewals + 1) * log)
  unbiased = jnp.where(renewals == 0, 1.0, quotient)
  weight = jnp.where(identity_start, jnp.float32(1.0 - decay), unbiased)

  def one(name, old, new):
    if isinstance(old, Kronecker):  # one side alone may be the identity: of inputs +1 and -1
      unseen = _is_identity(old.inputs) & _is_identity(old.outputs)
    else:
      unseen = ~_any_of_layer(old, lambda x: x != 1, stacked[name])
    own = jnp.where(jnp.logical_or(identity_start, ~unseen), weight, 1.0)
    mix = lambda old, new: (1.0 - _spread(own, old)) * old + _spread(own, old) * new
    return jax.tree.map(mix, old, new)

  return {name: one(name, average, fresh[name]) for name, average in old.items()}


def _spread(of_layers: jax.Array, like: jax.Array) -> jax.Array:
  return jnp.expand_dims(of_layers, range(of_layers.ndim, like.ndim))


def _any_of_layer(diagonal: Diagonal, condition: Callable, stacked: int) -> jax.Array:
  """Whether a number of each layer of a stack meets the condition."""
  found = [condition(x).any(axis=tuple(range(stacked, x.ndim))) for x in diagonal.values]
  return functools.reduce(jnp.logical_or, found)


def _is_identity(factor: jax.Array | Diagonals) -> jax.Array:
  """Whether a factor, each of a stack, has had no estimate; [...]."""
  if isinstance(factor, Diagonals):
    return (factor.values == 1).all(axis=-1)
  return (factor == jnp.eye(factor.shape[-1])).all(axis=(-2, -1))


def keep_unseen(
  old: dict[str, Any], fresh: dict[str, Any], stacked: Mapping[str, int] = _UNSTACKED
) -> dict[str, Any]:
  """Fresh factors by name, but the old ones of a layer whose estimate is zero.

  Such a layer was not reached, or saw only padding. `stacked` is that of `averaged`.
  """

  def one(name, old, new):
    if isinstance(new, Kronecker):
      seen = (algebra.mean_eigenvalue(new.inputs) > 0) | (algebra.mean_eigenvalue(new.outputs) > 0)
    else:
      seen = _any_of_layer(new, lambda x: x != 0, stacked[name])
    return jax.tree.map(lambda old, new: jnp.where(_spread(seen, new), new, old), old, new)

  return {name: one(name, average, fresh[name]) for name, average in old.items()}


def curvature_of(
  predict: Callable,
  params: Any,
  batch: Any,
  plain: Any = (),
  full_factors: Any = (),
  max_factor: Any = None,
  **options: Any,
):
  """The curvature of a model, traced once for all optimizers of the same model and batch."""
  options["max_factor"] = MAX_FACTOR if max_factor is None else max_factor
  if isinstance(several := options.get("likelihood"), Mapping):
    options["likelihood"] = FrozenDict(several)  # has a hash
  hashable = lambda patterns: patterns if isinstance(patterns, str) else tuple(patterns)
  options |= {"plain": hashable(plain), "full_factors": hashable(full_factors)}
  if not callable(predict):
    raise ValueError(
      f"predict is of type {type(predict).__name__}; allowed: a function of (params, batch)"
    )
  shapes = jax.eval_shape(lambda *trees: trees, params, batch)
  leaves, structure = jax.tree.flatten(shapes)
  arguments = predict, structure, tuple(leaves), tuple(sorted(options.items()))
  try:
    return _traced(*arguments)
  except TypeError as e:  # a callable, or a likelihood, without a hash
    if "unhashable" not in str(e):
      raise
    return _traced.__wrapped__(*arguments)


@functools.lru_cache(maxsize=4)
def _traced(predict, structure, leaves, options):
  params, batch = jax.tree.unflatten(structure, leaves)
  curvature = _curvature_module().Curvature(predict, params, batch, **dict(options))
  _warn(curvature.blocks, unasked=dict(options)["max_factor"] == MAX_FACTOR)
  return curvature


def _warn(blocks, unasked: bool) -> None:
  """Logs once in a process that factors are diagonal unasked, or that OpenBLAS may be slow."""
  for block in blocks if unasked else ():
    for size, diagonal in zip(block.factor_sizes, block.diagonal):
      if diagonal and not block.paths[0].endswith("embedding"):
        _say(f"K-FAC keeps the diagonal of a factor of {size:,} rows of {block.name} (max_factor)")
  threads = os.environ.get("OPENBLAS_NUM_THREADS")
  if threads is None and (os.cpu_count() or 1) > 1 and jax.default_backend() == "cpu":
    _say(
      "K-FAC inverts on the CPU: threads of OpenBLAS can make that many times slower beside"
      " another busy process; set OPENBLAS_NUM_THREADS=1 before Python starts"
    )


@functools.lru_cache(maxsize=None)
def _say(line: str) -> None:
  logging.getLogger(__name__).warning(line)


def _curvature_module():
  """Imports kfac-jax on demand: all else runs without it."""
  try:
    with without("tensorflow"):  # its TensorFlow Probability would import it
      from mixer_jax.optim import curvature
  except (ImportError, AttributeError) as e:
    raise ImportError(
      f"K-FAC needs a kfac-jax that works with JAX {jax.__version__} ({_kfac_version()} is"
      f" installed; 0.0.8 works with jax >= 0.8.3, < 0.13): {e}"
    ) from e
  return curvature


def _kfac_version() -> str:
  try:
    return f"kfac-jax {metadata.version('kfac-jax')}"
  except metadata.PackageNotFoundError:
    return "no kfac-jax"
