"""The optimizers of a config: the options of each, as fields, and how it is made of them."""

import dataclasses
import functools
from typing import Annotated, Any, Callable, NamedTuple

import jax

from mixer_jax.optim import first_order, kfac, kfac_basis, preconditioner, quadratic, soap
from mixer_jax.optim.algebra import Decomposition
from mixer_jax.optim.curvature.curvature import MAX_FACTOR, Curvature
from mixer_jax.optim.matrices import Matrices, matrix_axes
from mixer_jax.options import COUNT, TINY, Option, one_of

Count = lambda text: Annotated[int, Option(text, 1, COUNT)]
Momentum = Annotated[float, Option("decay of the momentum", 0, 0.99999)]
Decay = Annotated[float, Option("weight decay", 0)]
B1 = Annotated[float, Option("decay of the first moments", 0, 0.99999)]
B2 = Annotated[float, Option("decay of the second moments", 0, 0.9999999)]
Eps = Annotated[float, Option("added to the root of the second moments", TINY)]
Rms = Annotated[float, Option("root mean square of an update of a matrix", TINY)]
Nesterov = Annotated[bool, Option("Nesterov's momentum")]
AdamPaths = Annotated[
  str, Option('regular expression of matrices that take Adam, beside embeddings; "": none')
]
Damping = Annotated[float, Option("added to the curvature", TINY)]
FactorDecay = Annotated[float, Option("decay of the averages of the factors", 0, 0.9999999)]
# Weight decay may wait for 20 factor periods.
FactorPeriod = Annotated[int, Option("updates between renewals of the factors", 1, COUNT // 20)]
BasisPeriod = Annotated[int, Option("updates between renewals of the eigenbasis", 1, COUNT)]
InversePeriod = Annotated[int, Option("updates between renewals of the inverses", 1, COUNT)]
MaxFactor = Annotated[
  int | None, Option("rows above which a factor is kept as its diagonal; None: 8,192", 1, COUNT)
]
FullFactors = Annotated[
  str, Option("regular expression of parameter paths whose factors max_factor does not cut")
]
Fraction = Annotated[
  float | None,
  Option("part of the batch, 1/n, that the factors are estimated from; None: all", 1e-6, 1),
]
Refresh = one_of("a basis by eigh, or by a warm-started QR step", ("eigh", "qr"))
Tolerance = Annotated[
  float | None, Option("qr leaves a basis whose relative off-diagonal part is at most this", 0, 1)
]
Products = one_of("operands of the products that precondition", ("float32", "bfloat16"))
_BY_MODEL = "steps to the minimum of the quadratic model, times the learning rate"


class Problem(NamedTuple):
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

  def matrices(self) -> Matrices:
    return matrix_axes(self.predict, self.params, self.batch, self.in_axes)


class Made(NamedTuple):
  """What an optimizer is made of beside its options: rate, decay, mask, problem, and damping."""

  rate: Any
  weight_decay: Any
  mask: Any
  problem: Problem | None
  damping: Any = None


@dataclasses.dataclass(frozen=True)
class Sgd:
  momentum: Momentum = 0.9
  nesterov: Nesterov = False
  weight_decay: Decay = 0.0

  def make(self, of: Made) -> Any:
    own = dict(momentum=self.momentum, nesterov=self.nesterov)
    return first_order.sgd(of.rate, weight_decay=of.weight_decay, decay_mask=of.mask, **own)


@dataclasses.dataclass(frozen=True)
class Adam:
  b1: B1 = 0.9
  b2: B2 = 0.999
  eps: Eps = 1e-8
  weight_decay: Decay = 0.0

  def make(self, of: Made) -> Any:
    return first_order.adam(
      of.rate, **_moments(self), weight_decay=of.weight_decay, decay_mask=of.mask
    )


@dataclasses.dataclass(frozen=True)
class AdamW:
  b1: B1 = 0.9
  b2: B2 = 0.999
  eps: Eps = 1e-8
  weight_decay: Decay = 1e-2

  def make(self, of: Made) -> Any:
    return first_order.adamw(
      of.rate, **_moments(self), weight_decay=of.weight_decay, decay_mask=of.mask
    )


@dataclasses.dataclass(frozen=True)
class Lamb:
  b1: B1 = 0.9
  b2: B2 = 0.999
  eps: Eps = 1e-6
  weight_decay: Decay = 0.0

  def make(self, of: Made) -> Any:
    about = dict(weight_decay=of.weight_decay, decay_mask=of.mask, matrices=_matrices(of.problem))
    return first_order.lamb(of.rate, **_moments(self), **about)


@dataclasses.dataclass(frozen=True)
class Adagrad:
  initial_accumulator: Annotated[float, Option("sum of squares to start from", 0)] = 0.1
  eps: Annotated[float, Option("added to the sum of squares, under the root", TINY)] = 1e-7
  weight_decay: Decay = 0.0

  def make(self, of: Made) -> Any:
    own = dict(initial_accumulator=self.initial_accumulator, eps=self.eps)
    return first_order.adagrad(of.rate, weight_decay=of.weight_decay, decay_mask=of.mask, **own)


@dataclasses.dataclass(frozen=True)
class Muon:
  momentum: Momentum = 0.95
  nesterov: Nesterov = True
  rms: Rms = 0.2
  b1: B1 = 0.9
  b2: B2 = 0.999
  eps: Eps = 1e-8
  adam_paths: AdamPaths = first_order.NOT_BY_MUON
  weight_decay: Decay = 1e-2

  def make(self, of: Made) -> Any:
    own = {k: v for k, v in dataclasses.asdict(self).items() if k != "weight_decay"}
    about = dict(weight_decay=of.weight_decay, decay_mask=of.mask, matrices=_matrices(of.problem))
    return first_order.muon(of.rate, **own, **about)


@dataclasses.dataclass(frozen=True)
class _Basis:
  """How bases of gradients' factors are renewed."""

  max_factor: MaxFactor = None
  full_factors: FullFactors = ""
  factor_decay: FactorDecay = 0.95
  factor_period: FactorPeriod = 1
  basis_period: BasisPeriod = 10
  refresh: Refresh = "eigh"
  tolerance: Tolerance = None
  products: Products = "float32"

  def keywords(self, of: Made) -> dict[str, Any]:
    mesh = of.problem.mesh if of.problem else None
    return dict(
      max_factor=_limits(self),
      matrices=_matrices(of.problem),
      factor_decay=self.factor_decay,
      factor_period=self.factor_period,
      basis_period=self.basis_period,
      decomposition=Decomposition(self.refresh, self.tolerance, self.products, mesh),
    )


@dataclasses.dataclass(frozen=True)
class Shampoo(_Basis):
  b2: B2 = 0.95
  eps: Eps = 1e-8
  power: Annotated[float, Option("exponent p of the factors: L^-p V R^-p", 0.01, 1)] = 0.25
  ridge: Annotated[float, Option("added to a factor, times its largest eigenvalue", 0, 1)] = 1e-6
  corrected: Annotated[bool, Option("second moments in the place of eigenvalues")] = False
  momentum: Momentum = 0.9
  weight_decay: Decay = 1e-4

  def make(self, of: Made) -> Any:
    own = {k: getattr(self, k) for k in ("b2", "eps", "power", "ridge", "corrected")}
    rule = soap.scale_by_shampoo(**own, **self.keywords(of))
    return soap.with_averaged_steps(rule, of.rate, self.momentum, of.weight_decay, of.mask)


@dataclasses.dataclass(frozen=True)
class Soap(_Basis):
  b1: B1 = 0.95
  b2: B2 = 0.95
  eps: Eps = 1e-8
  refresh: Refresh = "qr"
  weight_decay: Decay = 1e-2

  def make(self, of: Made) -> Any:
    about = dict(weight_decay=of.weight_decay, decay_mask=of.mask)
    return soap.soap(of.rate, **_moments(self), **about, **self.keywords(of))


@dataclasses.dataclass(frozen=True)
class _Curvature:
  """What is estimated, and how often."""

  estimation: one_of(
    "targets of the Fisher: drawn, all classes, or the labels", ("sampled", "exact", "empirical")
  ) = "sampled"
  unpreconditioned: Annotated[
    str, Option("regular expression of parameter paths that take the plain gradient")
  ] = ""
  max_factor: MaxFactor = None
  full_factors: FullFactors = ""
  factor_decay: FactorDecay = 0.8
  factor_period: FactorPeriod = 10
  factor_fraction: Fraction = None
  refresh: Refresh = "eigh"
  tolerance: Tolerance = None
  products: Products = "float32"

  def curvature(self, problem: Problem) -> Curvature:
    """That of a problem, traced once for all optimizers with these options."""
    return _curvature(problem.predict, _Once(problem), self)

  def keywords(self) -> dict[str, Any]:
    how = Decomposition(self.refresh, self.tolerance, self.products)
    names = ("factor_decay", "factor_period", "factor_fraction")
    return {k: getattr(self, k) for k in names} | {"decomposition": how}


@dataclasses.dataclass(frozen=True)
class Kfac(_Curvature):
  damping: Damping = 1e-2
  damping_type: one_of(
    "where damping is added: to A (x) G, or to both factors", ("exact", "factored")
  ) = "exact"
  token_averaging: one_of("convention for weights shared over tokens", ("published", "expand")) = (
    "published"
  )
  norms: one_of("curvature of scales and shifts: none, or a diagonal", ("gradient", "diagonal")) = (
    "gradient"
  )
  inverse_period: InversePeriod = 20
  identity_start: Annotated[bool, Option("start the averages of the factors at the identity")] = (
    True
  )
  eigenvalues: one_of(
    "products of the factors' own, or second moments in their basis (EK-FAC)",
    ("factors", "batch", "examples"),
  ) = "factors"
  moment_decay: Annotated[float, Option("decay of EK-FAC's second moments", 0, 1)] = 0.95
  momentum: Momentum = 0.9
  weight_decay: Annotated[float, Option("weight decay, after preconditioning", 0)] = 1e-4
  decay_from: Annotated[
    int | None, Option("first update that decays; None: 20 factor periods", 0, COUNT)
  ] = None
  norm_constraint: Annotated[
    float | None, Option("kl_clip, of layers with curvature; none with quadratic_model", 0)
  ] = 1e-2
  quadratic_model: Annotated[bool, Option(_BY_MODEL)] = False
  factor_damping_period: Annotated[
    int | None,
    Option("updates between choices of the factors' own damping; None: they have none", 1, COUNT),
  ] = None
  adaptive_damping: Annotated[bool, Option("damping by the Levenberg-Marquardt rule")] = False
  damping_period: Annotated[int, Option("updates between changes of the damping", 1, COUNT)] = 5
  damping_decay: Annotated[float, Option("change of adaptive damping per update", 0.01, 1)] = 0.95
  min_damping: Annotated[float, Option("least adaptive damping", TINY)] = 1e-8
  max_damping: Annotated[float, Option("largest adaptive damping", TINY)] = 1e8

  def make(self, of: Made) -> Any:
    curvature = self.curvature(of.problem)
    start = 20 * self.factor_period if self.decay_from is None else self.decay_from
    decay = kfac.settled(of.weight_decay, start)
    first = self._preconditioner(curvature, of.damping)
    if self.quadratic_model:
      tx = quadratic.by_quadratic_model(
        first,
        curvature,
        learning_rate=of.rate,
        damping=of.damping,
        weight_decay=decay,
        decay_mask=of.mask,
        factor_damping_period=self.factor_damping_period,
      )
    else:
      about = self.momentum, decay, of.mask, self.norm_constraint
      tx = kfac.complete(first, of.rate, curvature, *about)
    if not self.adaptive_damping:
      return tx
    rule = {
      k: getattr(self, k) for k in ("damping_period", "damping_decay", "min_damping", "max_damping")
    }
    rule |= dict(weight_decay=decay, decay_mask=of.mask) if self.quadratic_model else {}
    return quadratic.levenberg_marquardt(tx, curvature, of.damping, **rule)

  def _preconditioner(self, curvature: Curvature, damping: Any) -> Any:
    own = self.keywords() | dict(
      damping=damping, inverse_period=self.inverse_period, identity_start=self.identity_start
    )
    if self.eigenvalues == "factors":
      return preconditioner.scale_by_kfac(curvature, damping_type=self.damping_type, **own)
    if self.damping_type != "exact":
      raise ValueError(f"eigenvalues={self.eigenvalues!r} needs damping_type='exact'")
    moments = dict(moments=self.eigenvalues, moment_decay=self.moment_decay)
    return preconditioner.scale_by_ekfac(curvature, **moments, **own)


@dataclasses.dataclass(frozen=True)
class KfacAdam(_Curvature):
  b1: B1 = 0.9
  b2: B2 = 0.95
  eps: Eps = 1e-8
  basis_period: BasisPeriod = 20
  weight_decay: Decay = 1e-4

  def make(self, of: Made) -> Any:
    about = dict(weight_decay=of.weight_decay, decay_mask=of.mask, basis_period=self.basis_period)
    curvature = self.curvature(of.problem)
    return kfac_basis.kfac_adam(of.rate, curvature, **_moments(self), **about, **self.keywords())


@dataclasses.dataclass(frozen=True)
class KfacMuon(_Curvature):
  momentum: Momentum = 0.9
  nesterov: Nesterov = True
  ridge: Annotated[float, Option("added to a factor's eigenvalues, whose mean is 1", 1e-7)] = 1.0
  rms: Rms = 0.2
  newton_schulz: Annotated[int, Option("steps of the iteration to the polar factor", 1, 100)] = 3
  b1: B1 = 0.9
  b2: B2 = 0.999
  eps: Eps = 1e-8
  adam_paths: AdamPaths = first_order.NOT_BY_MUON
  basis_period: BasisPeriod = 20
  weight_decay: Decay = 1e-2

  def make(self, of: Made) -> Any:
    names = ("momentum", "nesterov", "ridge", "rms", "newton_schulz", "adam_paths", "basis_period")
    own = {k: getattr(self, k) for k in names} | self.keywords()
    others = first_order.optax.scale_by_adam(**_moments(self), nesterov=self.nesterov)
    rule = kfac_basis.scale_by_kfac_muon(self.curvature(of.problem), others=others, **own)
    return first_order.with_decoupled_decay(rule, of.rate, of.weight_decay, of.mask)


class _Once:
  """A problem that the cache of `_curvature` takes for equal to any other: its function is the key."""

  def __init__(self, problem: Problem):
    self.problem = problem

  def __eq__(self, other: Any) -> bool:
    return isinstance(other, _Once)

  def __hash__(self) -> int:
    return 0


@functools.lru_cache(maxsize=4)
def _curvature(predict: Callable, once: _Once, fields: _Curvature) -> Curvature:
  del predict
  # Factors of kernels shared over tokens enter bases and ratios alone where there is no damping.
  token_averaging, norms = (
    getattr(fields, "token_averaging", "expand"),
    getattr(fields, "norms", "gradient"),
  )
  return Curvature(
    **once.problem._asdict(),
    estimation=fields.estimation,
    token_averaging=token_averaging,
    norms=norms,
    unpreconditioned=fields.unpreconditioned,
    max_factor=_limits(fields),
  )


def _moments(fields: Any) -> dict[str, float]:
  return dict(b1=fields.b1, b2=fields.b2, eps=fields.eps)


def _matrices(problem: Problem | None) -> Matrices | None:
  return problem.matrices() if problem else None


def _limits(fields: Any) -> Any:
  """`max_factor` of these fields as `Curvature` takes it."""
  limit = MAX_FACTOR if fields.max_factor is None else fields.max_factor
  return {fields.full_factors: None, "": limit} if fields.full_factors else limit


OPTIMIZERS = {
  "sgd": Sgd,
  "adam": Adam,
  "adamw": AdamW,
  "lamb": Lamb,
  "adagrad": Adagrad,
  "muon": Muon,
  "shampoo": Shampoo,
  "soap": Soap,
  "kfac": Kfac,
  "kfac_adam": KfacAdam,
  "kfac_muon": KfacMuon,
}
