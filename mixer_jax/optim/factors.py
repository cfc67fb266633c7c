"""The curvature of a model, made once and on demand: all but K-FAC runs without kfac-jax."""

import functools
from importlib import metadata
import logging
import os
from typing import Any, Callable, Mapping

from flax.core import FrozenDict
import jax
import jax.numpy as jnp
import numpy as np

from mixer_jax.optim import algebra, curvature_options
from mixer_jax.optim.curvature_blocks import Diagonal, Kronecker
from mixer_jax.runtime.imports import without


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
  estimates: dict[str, jax.Array],
  decay: Any,
  identity_start: Any = False,
  skip_zeros: bool = True,
) -> tuple[dict[str, Any], dict[str, jax.Array]]:
  """The moving averages of factors after one more estimate, and how many each is of.

  Args:
    old: averages by name of the block.
    fresh: the estimate.
    estimates: how many estimates of each layer were averaged before, int32 [*stacked].
    decay: weight of the old average.
    identity_start: whether averages start at `old`; False: weights decay^age that sum to 1.
    skip_zeros: whether a layer whose estimate is zero keeps its average: it was not reached, or saw
      only padding. One whose estimate is not finite always does: a bad batch would stay for good.
  """
  log = jnp.log(jnp.float32(decay))

  def weight(number):
    """Of the newest of n + 1 estimates: (1 - decay) / (1 - decay^(n + 1))."""
    quotient = jnp.expm1(log) / jnp.expm1((number + 1) * log)
    # Of the first it must be 1 exactly, which the quotient is not: some of `old` would stay.
    unbiased = jnp.where(number == 0, 1.0, quotient)
    return jnp.where(identity_start, jnp.float32(1.0 - decay), unbiased)

  def mixed(name, number):
    own, sizes = weight(number), _sizes(fresh[name], number.ndim)
    seen = ((sizes > 0).any(axis=0) | (not skip_zeros)) & jnp.isfinite(sizes).all(axis=0)

    def mix(old, new):
      w, kept = (jnp.expand_dims(x, range(number.ndim, old.ndim)) for x in (own, ~seen))
      return jnp.where(kept, old, (1.0 - w) * old + w * new)

    return jax.tree.map(mix, old[name], fresh[name]), number + seen

  both = {name: mixed(name, number) for name, number in estimates.items()}
  return tuple({name: pair[i] for name, pair in both.items()} for i in (0, 1))


def _sizes(factors: Kronecker | Diagonal, stacked: int) -> jax.Array:
  """A size of each factor of a layer, of each of a stack, [factors, *stacked]: 0 only of zeros."""
  if isinstance(factors, Kronecker):
    return jnp.stack([algebra.mean_eigenvalue(factor) for factor in factors])
  total = lambda x: jnp.abs(x).sum(axis=tuple(range(stacked, x.ndim)))
  return jnp.stack([total(x) for x in factors.values])


def curvature_of(
  predict: Callable,
  params: Any,
  batch: Any,
  *,
  likelihood: Any = "categorical",
  estimation: curvature_options.Estimation = "sampled",
  token_averaging: curvature_options.TokenAveraging = "published",
  norms: curvature_options.Norms = "gradient",
  plain: curvature_options.Plain = "",
  max_factor: curvature_options.MaxFactor = None,
  full_factors: curvature_options.FullFactors = "",
  axis_name: Any = None,
):
  """The curvature of a model, traced once for all optimizers of it; options: see `scale_by_kfac`."""
  hashable = lambda patterns: patterns if isinstance(patterns, str) else tuple(patterns)
  options = dict(
    likelihood=FrozenDict(likelihood) if isinstance(likelihood, Mapping) else likelihood,
    estimation=estimation,
    token_averaging=token_averaging,
    norms=norms,
    plain=hashable(plain),
    max_factor=curvature_options.MAX_FACTOR if max_factor is None else max_factor,
    full_factors=hashable(full_factors),
    axis_name=axis_name,
  )
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
  _warn(curvature.blocks, unasked=dict(options)["max_factor"] == curvature_options.MAX_FACTOR)
  return curvature


@curvature_options.checked(curvature_of)
def kfac_blocks(predict: Callable, params: Any, batch: Any, **options: Any):
  """The tuple of `curvature_blocks.Block` that `scale_by_kfac` of these arguments uses."""
  return curvature_of(predict, params, batch, **options).blocks


@curvature_options.checked(curvature_of)
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
  except Exception as e:  # it uses parts of JAX that are not public
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
