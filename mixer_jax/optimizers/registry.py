"""The fields of each optimizer, and how it is made of them.

The fields of an optimizer are the keywords of the functions that it is made by, with their defaults;
`_FIELDS` says of each name what it means and which values a config may give it.
"""

import dataclasses
import functools
import inspect
from typing import Annotated, Any, Callable, Mapping, NamedTuple

import jax
import optax

from mixer_jax import optim
from mixer_jax.optim import first_order
from mixer_jax.optim.broyden import METHODS
from mixer_jax.optim.curvature.curvature import MAX_FACTOR
from mixer_jax.optim.kfac import complete, settled
from mixer_jax.optim.soap import from_second, with_averaged_steps
from mixer_jax.options import Option


def _number(text: str, low: float = 0, high: float = float("inf"), kind: Any = float) -> Any:
  return Annotated[kind, Option(text, low, high)]


def _count(text: str, low: int = 1, high: float = float("inf"), kind: Any = int) -> Any:
  return _number(text, low, high, kind)


def _choice(text: str, *choices: str) -> Any:
  return Annotated[str, Option(text, choices=choices)]


def _text(text: str) -> Any:
  return Annotated[str, Option(text)]


def _flag(text: str) -> Any:
  return Annotated[bool, Option(text)]


_FIELDS = {
  "momentum": _number("decay of the momentum", 0, 1),
  "nesterov": _flag("Nesterov's momentum"),
  "weight_decay": _number("weight decay; of K-FAC after preconditioning"),
  "b1": _number("decay of the first moments", 0, 1),
  "b2": _number("decay of the second moments", 0, 1),
  "eps": _number("added to the root of the second moments (adagrad: under it)"),
  "initial_accumulator": _number("sum of squares to start from"),
  "rms": _number("root mean square of an update of a matrix"),
  "normuon": _flag("divide an update of each neuron by its running root mean square, as NorMuon"),
  "adam_paths": _text('regular expression of matrices that take Adam, beside embeddings; "": none'),
  "power": _number("exponent p of the factors: L^-p V R^-p", 0.01, 1),
  "ridge": _number("added to eigenvalues: of a mean of 1, or (shampoo) times the largest"),
  "corrected": _flag("second moments in the place of eigenvalues"),
  "newton_schulz": _count("steps of the iteration to the polar factor", 1, 100),
  "estimation": _choice(
    "targets of the Fisher: drawn, all classes, or the labels", "sampled", "exact", "empirical"
  ),
  "token_averaging": _choice("convention for weights shared over tokens", "published", "expand"),
  "norms": _choice("curvature of scales and shifts: none, or a diagonal", "gradient", "diagonal"),
  "unpreconditioned": _text("regular expression of parameter paths that take the plain gradient"),
  "max_factor": _count(
    "rows above which a factor is kept as its diagonal; None: 8,192", kind=int | None
  ),
  "full_factors": _text(
    "regular expression of parameter paths whose factors max_factor does not cut"
  ),
  "damping": _number("added to the curvature"),
  "damping_type": _choice(
    "where damping is added: to A (x) G, or to both factors", "exact", "factored"
  ),
  "factor_decay": _number("decay of the averages of the factors", 0, 1),
  "factor_period": _count("updates between renewals of the factors", 1),
  "factor_fraction": _number(
    "part of the batch, 1/n, that the factors are estimated from; None: all", 1e-6, 1, float | None
  ),
  "inverse_period": _count("updates between renewals of the inverses"),
  "basis_period": _count("updates between renewals of the eigenbasis"),
  "identity_start": _flag("start the averages of the factors at the identity"),
  "refresh": _choice("a basis by eigh, or by a warm-started QR step", "eigh", "qr"),
  "tolerance": _number(
    "qr leaves a basis whose relative off-diagonal part is at most this", 0, 1, float | None
  ),
  "linear_algebra": _choice(
    "decompositions by a library, by matrix products alone, or by products on a TPU alone",
    *("platform", "library", "products"),
  ),
  "products": _choice("operands of the products that precondition", "float32", "bfloat16"),
  "eigenvalues": _choice(
    "products of the factors' own, or second moments in their basis (EK-FAC)",
    *("factors", "batch", "examples"),
  ),
  "moment_decay": _number("decay of EK-FAC's second moments", 0, 1),
  "decay_from": _count("first update that decays; None: 20 factor periods", 0, kind=int | None),
  "norm_constraint": _number("kl_clip, of layers with curvature", kind=float | None),
  "quadratic_model": _flag("steps to the minimum of the quadratic model, times the learning rate"),
  "factor_damping_period": _count(
    "updates between choices of the factors' own damping; None: they have none", kind=int | None
  ),
  "adaptive_damping": _flag("damping by the Levenberg-Marquardt rule"),
  "damping_period": _count("updates between changes of the damping"),
  "damping_decay": _number("change of adaptive damping per update", 0.01, 1),
  "min_damping": _number("least adaptive damping"),
  "max_damping": _number("largest adaptive damping"),
  "max_increase": _number(
    "growth of the batch's loss beyond which a step is not made; None: none", kind=float | None
  ),
  "acceleration": _flag("add the second order of residuals along a step to it"),
  "line_search": _flag("multiply steps by the power of two with the least loss"),
  "bias_correction": _flag("divide the momentum's first directions by their share"),
  "max_rows": _count("most residuals of a batch"),
  "max_iterations": _count("most iterations of conjugate gradients for a step"),
  "cg_tolerance": _number("progress of the model, for each iteration, at which they end"),
  "warm_start": _number("factor of the last solution, where they begin", 0, 1),
  "memory_size": _count("pairs of steps and gradients that are kept"),
  "iterations": _count("steps of an update, all on its batch"),
  "max_linesearch_steps": _count("most evaluations of the loss in a line search"),
  "method": _choice("how the inverse of the Hessian matrix is renewed", *METHODS),
}


# What a curvature is made of, beside a problem; with conventions that act neither on bases nor on
# ratios of eigenvalues, of optimizers without damping.
_OF_CURVATURE = dict(
  token_averaging="expand",
  norms="gradient",
  estimation="sampled",
  unpreconditioned="",
  max_factor=None,
  full_factors="",
)


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
  """The task as an optimizer sees it.

  Attributes:
    predict: maps (params, batch) to (outputs, targets).
    params: the parameters, or their shapes.
    batch: an example batch, or its shapes.
    likelihood: see `Curvature`, a name or another of its forms.
    in_axes: see `Curvature`.
    mesh: the devices of the training step, or None.
  """

  predict: Callable[[Any, Any], Any]
  params: Any
  batch: Any
  likelihood: Any
  in_axes: Any = 0
  mesh: jax.sharding.Mesh | None = None
  _traced: dict[Any, optim.Curvature] = dataclasses.field(
    default_factory=dict, init=False, repr=False
  )

  def curvature(self, fields: Mapping[str, Any]) -> optim.Curvature:
    """Returns the curvature with these fields, traced once for all optimizers that share them."""
    known = {name: fields.get(name, value) for name, value in _OF_CURVATURE.items()}
    if (key := tuple(known.values())) not in self._traced:
      about = dict(likelihood=self.likelihood, in_axes=self.in_axes, mesh=self.mesh)
      own = about | _taken(optim.Curvature, known) | dict(max_factor=_limits(known))
      self._traced[key] = optim.Curvature(self.predict, self.params, self.batch, **own)
    return self._traced[key]

  @functools.cached_property
  def matrices(self) -> optim.Matrices:
    """The matrices among the parameters; both halves of a gated unit's kernel are one, as in the studies."""
    return optim.matrix_axes(self.predict, self.params, self.batch, self.in_axes, fused=True)


class Given(NamedTuple):
  """What makes an optimizer beside its fields; `common` holds weight_decay and decay_mask."""

  rate: Any
  common: Mapping[str, Any]
  problem: Problem | None


class Optimizer:
  """An optimizer of a config; its signature has the fields.

  Args:
    make: maps (`Given`, fields) to the transform.
    functions: whose keywords are fields.
    fields: further ones, or other defaults.
  """

  def __init__(
    self, make: Callable[[Given, dict[str, Any]], Any], *functions: Callable, **fields: Any
  ):
    self.make = make
    keywords = [p for f in functions for p in inspect.signature(f).parameters.values()]
    self.defaults = {p.name: p.default for p in keywords if p.name in _FIELDS} | fields
    keyword = inspect.Parameter.KEYWORD_ONLY
    self.__signature__ = inspect.Signature(
      inspect.Parameter(name, keyword, default=x, annotation=_FIELDS[name])
      for name, x in self.defaults.items()
    )

  def __call__(self, **fields: Any) -> dict[str, Any]:
    """Returns all fields, with defaults for those that are missing."""
    return self.defaults | fields


def _taken(function: Callable, fields: Mapping[str, Any]) -> dict[str, Any]:
  """The fields that are keywords of a function."""
  return {k: fields[k] for k in inspect.signature(function).parameters if k in fields}


def _first_order(function: Callable) -> Optimizer:
  def make(given, fields):
    own = _taken(function, fields) | given.common
    if given.problem and "matrices" in inspect.signature(function).parameters:
      own["matrices"] = given.problem.matrices
    return function(given.rate, **own)

  return Optimizer(make, function)


def _limits(fields: Mapping[str, Any]) -> Any:
  """The largest factors as `Curvature` takes them."""
  limit = MAX_FACTOR if fields["max_factor"] is None else fields["max_factor"]
  full = fields["full_factors"]
  return {full: None, "": limit} if full else limit


def _of_gradients(rule: Callable, finish: Callable, **defaults: Any) -> Optimizer:
  """SOAP or Shampoo; `finish` makes the optimizer of a rule."""

  def make(given, fields):
    mesh = given.problem.mesh if given.problem else None
    own = dict(
      max_factor=_limits(fields),
      matrices=given.problem.matrices if given.problem else None,
      decomposition=optim.Decomposition(**_taken(optim.Decomposition, fields), mesh=mesh),
    )
    return finish(rule(**_taken(rule, fields) | own), given, fields)

  basis = dict(max_factor=None, full_factors="")
  return Optimizer(make, rule, optim.Decomposition, **basis, **defaults)


def _soap(rule, given, fields):
  return from_second(rule, given.rate, **given.common)


def _shampoo(rule, given, fields):
  return with_averaged_steps(rule, given.rate, fields["momentum"], **given.common)


def _in_basis(rule: Callable, finish: Callable, **defaults: Any) -> Optimizer:
  """Adam or Muon in K-FAC's basis."""

  def make(given, fields):
    own = _taken(rule, fields) | finish(fields)
    decomposition = optim.Decomposition(**_taken(optim.Decomposition, fields))
    tx = rule(given.problem.curvature(fields), decomposition=decomposition, **own)
    return first_order.with_decoupled_decay(tx, given.rate, *given.common.values())

  shown = dict(estimation="sampled", unpreconditioned="", max_factor=None, full_factors="")
  return Optimizer(make, rule, optim.Decomposition, **shown, **defaults)


def _others(fields: Mapping[str, Any]) -> dict[str, Any]:
  own = {name: fields[name] for name in ("b1", "b2", "eps")}
  return {"others": optax.scale_by_adam(**own, nesterov=True)}


def _kfac(given: Given, fields: dict[str, Any]) -> Any:
  whole, (decay, mask) = given.problem.curvature(fields), given.common.values()
  start = 20 * fields["factor_period"] if fields["decay_from"] is None else fields["decay_from"]
  decay = settled(decay, start)
  if fields["eigenvalues"] == "factors":
    rule, moments = optim.scale_by_kfac, {}
  elif fields["damping_type"] == "exact":
    rule, moments = optim.scale_by_ekfac, {"moments": fields["eigenvalues"]}
  else:
    raise ValueError(f"eigenvalues={fields['eigenvalues']!r} needs damping_type='exact'")
  decomposition = optim.Decomposition(**_taken(optim.Decomposition, fields))
  tx = rule(whole, **_taken(rule, fields), **moments, decomposition=decomposition)
  objective = dict(weight_decay=decay, decay_mask=mask) if fields["quadratic_model"] else {}
  if fields["quadratic_model"]:
    own = {name: fields[name] for name in ("damping", "factor_damping_period")}
    tx = optim.by_quadratic_model(tx, whole, learning_rate=given.rate, **objective, **own)
  else:
    about = fields["momentum"], decay, mask, fields["norm_constraint"]
    tx = complete(tx, given.rate, whole, *about)
  if not fields["adaptive_damping"]:
    return tx
  rule = _taken(optim.levenberg_marquardt, fields)
  return optim.levenberg_marquardt(tx, whole, **rule | objective)


def _gauss_newton(given: Given, fields: dict[str, Any]) -> Any:
  own = _taken(optim.gauss_newton, fields) | dict(learning_rate=given.rate)
  return optim.gauss_newton(given.problem.curvature(fields), **own)


def _hessian_free(given: Given, fields: dict[str, Any]) -> Any:
  whole, own = given.problem.curvature(fields), _taken(optim.hessian_free, fields)
  renewals = {name: fields[name] for name in ("factor_decay", "factor_period", "inverse_period")}
  own["precondition"] = optim.scale_by_kfac(whole, **renewals, identity_start=False)
  return optim.hessian_free(whole, **own | dict(learning_rate=given.rate))


def _by_search(function: Callable) -> Optimizer:
  """A quasi-Newton method."""
  return Optimizer(lambda given, fields: function(given.rate, **_taken(function, fields)), function)


# Those that make whole steps: they take no decay, no clipped gradient and no layer_decay, and a rate of 1.
WHOLE_STEPS = ("gauss_newton", "hessian_free", "lbfgs", "ssbroyden")
OPTIMIZERS = {
  "sgd": _first_order(optim.sgd),
  "adam": _first_order(optim.adam),
  "adamw": _first_order(optim.adamw),
  "lamb": _first_order(optim.lamb),
  "adagrad": _first_order(optim.adagrad),
  "muon": _first_order(optim.muon),
  "shampoo": _of_gradients(optim.scale_by_shampoo, _shampoo, momentum=0.9, weight_decay=1e-4),
  "soap": _of_gradients(optim.scale_by_soap, _soap, refresh="qr", weight_decay=1e-2),
  "kfac": Optimizer(
    _kfac,
    *(optim.kfac, optim.scale_by_kfac, optim.Decomposition, optim.levenberg_marquardt),
    **dict(
      token_averaging="published", norms="gradient", estimation="sampled", unpreconditioned=""
    ),
    **dict(max_factor=None, full_factors="", eigenvalues="factors", moment_decay=0.95),
    **dict(decay_from=None, quadratic_model=False, factor_damping_period=None),
    **dict(adaptive_damping=False, weight_decay=1e-4),
  ),
  "kfac_adam": _in_basis(optim.scale_by_kfac_adam, lambda fields: {}, weight_decay=1e-4),
  "kfac_muon": _in_basis(
    optim.scale_by_kfac_muon, _others, b1=0.9, b2=0.999, eps=1e-8, weight_decay=1e-2
  ),
  "gauss_newton": Optimizer(_gauss_newton, optim.gauss_newton),
  "hessian_free": Optimizer(
    _hessian_free,
    optim.hessian_free,
    **dict(estimation="sampled", factor_decay=0.5, factor_period=1, inverse_period=1),
  ),
  "lbfgs": _by_search(optim.lbfgs),
  "ssbroyden": _by_search(optim.ssbroyden),
}
