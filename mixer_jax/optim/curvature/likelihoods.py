"""Predictive distributions: targets drawn from a model, and the Fisher matrix of its outputs."""

import itertools
from typing import Any, Callable, Mapping, NamedTuple

import jax
import jax.numpy as jnp

from mixer_jax.optim.curvature import library
from mixer_jax.optim.curvature.patterns import check_choice


class Likelihood(NamedTuple):
  """A distribution of independent rows of targets, given outputs [..., n].

  Attributes:
    sample: (key, outputs) -> targets drawn from the model.
    gradient: (outputs, targets) -> the gradient of minus the log-likelihood of each row with
      respect to the outputs, of their shape. With a weight it is multiplied by the root of the
      weight: its squares are those of the Fisher matrix.
    factor: (outputs, v) -> B v, with B B^T the Fisher matrix of each row; v is like the outputs.
      None: `estimation="exact"` is refused.
    parts: number of arrays of the outputs; more than one stand in a tuple.
    width: the least n.
    weight: weight of minus the log-likelihood in the loss; None: of a mapping whose weights differ.
    labelled: whether a row has one target, so that its outputs have no weights of their own.
    inner: the likelihoods by the keys of the outputs, if they are a mapping.
    fixed_targets: whether targets have the shape of the outputs, or of their rows if `labelled`.
    slope: (outputs, targets) -> the gradient of the weighted loss; None: `gradient`.
    roots: (outputs, targets) -> r with `factor`(outputs, r) the slope; None: by least squares.

  Example:
    A Poisson distribution, whose outputs are logarithms of rates:

    ```python
    import jax
    import jax.numpy as jnp
    from mixer_jax import optim

    poisson = optim.Likelihood(
      sample=lambda key, y: jax.random.poisson(key, jnp.exp(y)).astype(y.dtype),
      gradient=lambda y, targets: jnp.exp(y) - targets,
      factor=lambda y, v: jnp.exp(y / 2) * v,
    )
    predict = lambda params, x: x @ params["w"]
    curvature = optim.Curvature(predict, {"w": jnp.ones((3, 2))}, jnp.eye(3), likelihood=poisson)
    ```
  """

  sample: Callable[[jax.Array, Any], Any]
  gradient: Callable[[Any, Any], Any]
  factor: Callable[[Any, Any], Any] | None = None
  parts: int = 1
  width: int = 1
  weight: Any = 1.0
  labelled: bool = False
  inner: Mapping[str, Any] | None = None
  fixed_targets: bool = False
  slope: Callable[[Any, Any], Any] | None = None
  roots: Callable[[Any, Any], Any] | None = None

  def slopes(self, outputs: Any, targets: Any) -> Any:
    """The gradient of the weighted loss of each row with respect to the outputs."""
    return (self.slope or self.gradient)(outputs, targets)

  def residual(self, outputs: Any, targets: Any) -> Any:
    """r with B r the slopes, where B B^T is the Fisher matrix of a row; of the shape of the outputs."""
    if self.roots is not None:
      return self.roots(outputs, targets)
    return _least_squares(self, outputs, targets)

  def is_output(self, answer: tuple) -> bool:
    """Whether a tuple is outputs, not outputs and targets."""
    return self.parts > 1 and len(answer) == self.parts and hasattr(answer[0], "shape")

  def arrays(self, outputs: Any) -> list[tuple[Any, bool]]:
    """Each array of the outputs, and whether its rows are `labelled`."""
    if self.inner:
      return [pair for key, part in self.inner.items() for pair in part.arrays(outputs[key])]
    return [(y, self.labelled) for y in jax.tree.leaves(outputs)]

  def check(self, outputs: Any, name: str = "the outputs") -> None:
    """Raises a ValueError for outputs, under this name, that are no rows of this distribution."""
    found, inner = tuple(outputs) if isinstance(outputs, Mapping) else (), self.inner or {}
    if found and not inner:
      raise ValueError(
        f"{name} have the keys {', '.join(map(str, found))}; allowed: a likelihood that is a"
        " mapping with these keys"
      )
    if set(found) != set(inner):
      named, allowed = (", ".join(map(str, keys)) or "none" for keys in (found, inner))
      raise ValueError(f"{name} have the keys {named}; allowed: {allowed}")
    for key, part in inner.items():
      part.check(outputs[key], f"{name}[{key!r}]")
    if not inner:
      self._check_arrays(outputs, name)

  def check_targets(self, outputs: Any, targets: Any) -> None:
    """Raises a ValueError for targets that do not fit, such as labels beside means."""
    if self.inner:
      for key, part in self.inner.items():
        part.check_targets(outputs[key], targets[key])
      return
    shape = jax.tree.leaves(outputs)[0].shape
    wanted = shape[:-1] if self.labelled else shape
    for x in jax.tree.leaves(targets):
      if self.fixed_targets and x.shape != wanted:
        raise ValueError(
          f"targets have shape {tuple(x.shape)} for outputs {tuple(shape)}; allowed: {tuple(wanted)}"
        )

  def _check_arrays(self, outputs: Any, name: str) -> None:
    leaves = jax.tree.leaves(outputs)
    if len(leaves) != self.parts:
      raise ValueError(
        f"{name} are {len(leaves)} arrays; the likelihood has {self.parts}, and targets or"
        " weights beside outputs stand in a tuple"
      )
    if self.parts == 1 and leaves[0] is not outputs:
      raise ValueError(f"{name} are a {type(outputs).__name__}; allowed: the one array in it")
    for y in leaves:
      if not jnp.issubdtype(y.dtype, jnp.floating):
        raise ValueError(f"{name} are {y.dtype}; allowed: floats, which have gradients")
      if len(y.shape) < 2 or y.shape[-1] < self.width:
        other = '; for one logit of a yes or no: likelihood="bernoulli", for a regression: "normal"'
        other = "; for one number: [:, None]" if len(y.shape) < 2 else other * (self.width > 1)
        raise ValueError(
          f"{name} have shape {tuple(y.shape)}; allowed: [batch, n] or [batch, tokens, n]"
          f" with n of {self.width} or more{other}"
        )


def _of_loss(loss: Callable, labels: bool = False, **about: Any) -> Likelihood:
  """A likelihood of kfac-jax; `loss` makes it from outputs and targets, maybe int labels."""
  like = lambda outputs, parts: jax.tree.structure(outputs).unflatten(parts)  # one with names, too

  def gradient(outputs, targets):
    if targets.dtype == bool:  # labels of two classes: kfac-jax makes no one-hot vectors of them
      targets = targets.astype(jnp.int32)
    return like(outputs, loss(outputs, targets).grad_of_evaluate(targets, "off"))

  def factor(outputs, v):
    inner = jnp.concatenate(jax.tree.leaves(v), axis=-1)
    return like(outputs, loss(outputs, None).multiply_fisher_factor(inner))

  def roots(outputs, targets):
    slopes = gradient(outputs, targets)
    if labels:  # of logits: B divides by the roots of the probabilities what sums to zero
      return jax.tree.map(_over, slopes, jnp.sqrt(jax.nn.softmax(outputs)))
    return jax.tree.map(_over, slopes, factor(outputs, jax.tree.map(jnp.ones_like, outputs)))

  sample = lambda key, outputs: loss(outputs, None).sample(key)
  about |= dict(labelled=labels, fixed_targets=True, roots=roots)
  return Likelihood(sample, gradient, factor, **about)


def _over(x: jax.Array, y: jax.Array) -> jax.Array:
  """x / y, 0 where y is: of outputs so far out that they have no curvature."""
  return jnp.where(y == 0, 0.0, x / jnp.where(y == 0, 1.0, y))


def _least_squares(likelihood: Likelihood, outputs: Any, targets: Any) -> Any:
  """The smallest r of `Likelihood.residual`."""
  leaves, structure = jax.tree.flatten(outputs)
  sizes = [y.shape[-1] for y in leaves]
  ends = list(itertools.accumulate(sizes))[:-1]
  whole = lambda tree: jnp.concatenate(jax.tree.leaves(tree), axis=-1)
  apart = lambda x: structure.unflatten(jnp.split(x, ends, axis=-1))
  like = whole(outputs)
  columns = [
    whole(likelihood.factor(outputs, apart(jnp.zeros_like(like).at[..., i].set(1))))
    for i in range(sum(sizes))
  ]
  inverse = jnp.linalg.pinv(jnp.stack(columns, axis=-1))
  return apart((inverse @ whole(likelihood.slopes(outputs, targets))[..., None])[..., 0])


def _named(name: str) -> Likelihood:
  kfac_jax = library.blocks().kfac_jax

  if name == "categorical":
    return _of_loss(kfac_jax.CategoricalLogitsNegativeLogProbLoss, labels=True, width=2)
  if name == "normal":  # of variance 1/2: minus the log-likelihood is the sum of squares
    return _of_loss(kfac_jax.NormalMeanNegativeLogProbLoss)
  if name == "bernoulli":
    return _of_loss(kfac_jax.MultiBernoulliNegativeLogProbLoss)
  of_pair = lambda y, targets: kfac_jax.NormalMeanVarianceNegativeLogProbLoss(*y, targets)
  return _of_loss(of_pair, parts=2)


def likelihood_of(given: Any) -> Likelihood:
  """A name, a `Likelihood`, a pair (weight, likelihood), or a mapping of them.

  A mapping has the keys of the outputs. With weights the loss is a weighted sum of minus the
  log-likelihoods.
  """
  if isinstance(given, Likelihood):
    return given
  if isinstance(given, Mapping):
    if not given:
      raise ValueError("likelihood is {}; allowed: a likelihood for each key of the outputs")
    return _several({k: likelihood_of(v) for k, v in given.items()})
  if isinstance(given, tuple):
    if len(given) != 2 or not _is_weight(given[0]):
      raise ValueError(
        f"likelihood is {given!r}; allowed as a tuple: (weight, likelihood), a weight of 0 or more"
      )
    return _weighted(given[0], likelihood_of(given[1]))
  check_choice("likelihood", given, ("categorical", "normal", "bernoulli", "normal_variance"))
  return _named(given)


def _is_weight(given: Any) -> bool:
  """Whether it is a number of 0 or more, or an array, which may be traced."""
  return hasattr(given, "shape") or (isinstance(given, int | float) and given >= 0)


def _weighted(weight: float, likelihood: Likelihood) -> Likelihood:
  """A likelihood whose logarithm is multiplied; the gradients' squares are, as the Fisher is."""

  def scaled(function):
    return lambda y, x: jax.tree.map(lambda z: jnp.sqrt(weight) * z, function(y, x))

  def slope(outputs, targets):
    return jax.tree.map(lambda z: weight * z, likelihood.slopes(outputs, targets))

  factor, roots = (f and scaled(f) for f in (likelihood.factor, likelihood.roots))
  whole = None if likelihood.weight is None else weight * likelihood.weight
  made = dict(factor=factor, weight=whole, slope=slope, roots=roots)
  return likelihood._replace(gradient=scaled(likelihood.gradient), **made)


def _several(parts: Mapping[str, Likelihood]) -> Likelihood:
  """Independent outputs: their log-likelihoods are added up."""

  def sample(key, outputs):
    keys = dict(zip(parts, jax.random.split(key, len(parts))))
    return {k: p.sample(keys[k], outputs[k]) for k, p in parts.items()}

  def gradient(outputs, targets):
    return {k: p.gradient(outputs[k], targets[k]) for k, p in parts.items()}

  def factor(outputs, v):
    return {k: p.factor(outputs[k], v[k]) for k, p in parts.items()}

  def slope(outputs, targets):
    return {k: p.slopes(outputs[k], targets[k]) for k, p in parts.items()}

  def roots(outputs, targets):
    return {k: p.residual(outputs[k], targets[k]) for k, p in parts.items()}

  exact = all(p.factor for p in parts.values())
  first, *others = (p.weight for p in parts.values())
  equal = lambda w: w is first or (isinstance(w, int | float) and w == first)
  weight = first if all(map(equal, others)) else None
  made = dict(factor=factor, roots=roots) if exact else {}
  return Likelihood(sample, gradient, weight=weight, inner=parts, slope=slope, **made)
