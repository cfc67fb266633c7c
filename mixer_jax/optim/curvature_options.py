"""Options that K-FAC and its relatives share."""

import functools
import math
import re
from typing import Annotated, Any, Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mixer_jax import options
from mixer_jax.errors import UserError
from mixer_jax.options import COUNT, TINY, Option

# Values of the options of K-FAC that take names.
CHOICES = {
  "damping_type": ("exact", "factored"),
  "likelihood": ("categorical", "normal", "bernoulli", "normal_variance"),
  "estimation": ("sampled", "exact", "empirical"),
  "token_averaging": ("published", "expand"),
  "norms": ("gradient", "diagonal"),
  "eigenvalues": ("factors", "batch", "examples"),
  "precondition_dtype": ("float32", "bfloat16"),
  "refresh": ("eigh", "qr"),
}


def _choice(name: str, text: str) -> Any:
  return Annotated[str, Option(text, choices=CHOICES[name])]


DampingType = _choice("damping_type", "where damping is added: to A (x) G, or to both factors")
Estimation = _choice("estimation", "targets of the Fisher: drawn, all classes, or the labels")
TokenAveraging = _choice("token_averaging", "convention for weights shared over tokens")
Norms = _choice("norms", "curvature of normalisations: none, or a diagonal")
Eigenvalues = _choice(
  "eigenvalues", "products of the factors' own, or second moments in their basis (EK-FAC)"
)
Refresh = _choice("refresh", "a basis by eigh, or by a warm-started QR step")
PreconditionDtype = _choice("precondition_dtype", "operands of the products that precondition")

SCHEDULED = ("damping", "weight_decay")  # options that take functions of the update count, too
Damping = Annotated[float, Option("added to the curvature", TINY)]
FactorDecay = Annotated[float, Option("decay of the averages of the factors", 0, 0.9999999)]
# Weight decay may wait for 20 factor periods.
FactorPeriod = Annotated[int, Option("updates between renewals of the factors", 1, COUNT // 20)]
InversePeriod = Annotated[int, Option("updates between renewals of the inverses", 1, COUNT)]
BasisPeriod = Annotated[int, Option("updates between renewals of the eigenbasis", 1, COUNT)]
Tolerance = Annotated[
  float | None, Option("qr leaves a basis whose relative off-diagonal part is at most this", 0, 1)
]
IdentityStart = Annotated[bool, Option("start the averages of the factors at the identity")]
MaxFactor = Annotated[
  int | None, Option("rows above which a factor is kept as its diagonal; None: 8,192", 1, COUNT)
]
MAX_FACTOR = 8192  # None stands for it, since optax.inject_hyperparams traces numbers
FactorFraction = Annotated[
  float | None,
  Option("part of the batch, 1/n, that the factors are estimated from; None: all", 1e-6, 1),
]
NormConstraint = Annotated[float | None, Option("kl_clip, of layers with curvature", 0)]
MOMENT_DECAY = 0.95  # another one without EK-FAC is refused
MomentDecay = Annotated[float, Option("decay of EK-FAC's second moments", 0, 1)]
Plain = Annotated[str, Option("regular expression of parameter paths that take the plain gradient")]

FullFactors = Annotated[
  str, Option("regular expression of parameter paths whose factors max_factor does not cut")
]


def check_choice(option: str, value: str) -> None:
  """Raises a ValueError if an option of `CHOICES` is none of them."""
  if value not in CHOICES[option]:
    raise ValueError(f"{option} is {value!r}; allowed: {', '.join(CHOICES[option])}")


def check_refresh(refresh: str, tolerance: float | None) -> None:
  """Raises a ValueError for a tolerance without "qr"."""
  if tolerance is not None and refresh == "eigh":
    raise ValueError(f'tolerance is {tolerance}; it needs refresh="qr"')


def check_fraction(fraction: float | None) -> None:
  """Raises a ValueError if a part of a batch is not every n-th example, within 2%."""
  if fraction is not None and not (
    0 < fraction <= 1 and abs(fraction * round(1 / fraction) - 1) <= 0.02
  ):
    raise ValueError(f"factor_fraction is {fraction}; allowed: 1/n, such as 1, 0.5, 0.33, 0.25")


def check_combination(
  damping_type: str,
  refresh: str,
  eigenvalues: str,
  moment_decay: Any,
  factor_period: Any,
  inverse_period: Any,
) -> None:
  """Raises a ValueError for options that do not go together."""
  set_in_vain = isinstance(moment_decay, int | float) and moment_decay != MOMENT_DECAY
  if eigenvalues == "factors" and set_in_vain:
    raise ValueError(
      f"moment_decay is {moment_decay}; it needs eigenvalues='batch' or 'examples' (EK-FAC)"
    )
  if damping_type != "exact" and (eigenvalues != "factors" or refresh == "qr"):
    option = f"eigenvalues={eigenvalues!r}" if eigenvalues != "factors" else 'refresh="qr"'
    raise ValueError(f'{option} needs damping_type="exact"')
  known = isinstance(factor_period, int) and isinstance(inverse_period, int)
  if eigenvalues == "examples" and known and inverse_period % factor_period:
    raise ValueError(
      f"inverse_period is {inverse_period}; with eigenvalues='examples' allowed: a multiple of"
      f" factor_period, {factor_period}, so that each basis has second moments at once"
    )


def check_model(
  given: dict[str, Any],
  defaults: dict[str, Any],
  rule: dict[str, Any],
  *,
  quadratic_model: bool,
  adapts: bool,
  decays: bool,
) -> None:
  """Raises a ValueError for options of K-FAC that the model, or damping by it, would not heed.

  `given` are all options, `rule` those of `levenberg_marquardt` that were set. Arrays, which
  `optax.inject_hyperparams` makes of defaults as well, are not looked at.
  """
  known = lambda value: isinstance(value, int | float)
  for name in ("momentum", "norm_constraint") if quadratic_model else ():
    if known(given[name]) and given[name] != defaults[name]:
      raise ValueError(
        f"{name} is {given[name]}; a quadratic model takes its place: leave it at {defaults[name]}"
      )
  unused = [] if adapts else [name for name in rule if known(rule[name])]
  if unused:
    raise ValueError(f"{unused[0]} is {rule[unused[0]]}; it needs adaptive_damping=True")
  if quadratic_model and decays and given["eigenvalues"] == "batch":
    why = "second moments would be those of the gradient with its decay"
    raise ValueError(f'quadratic_model with eigenvalues="batch" needs weight_decay=0: {why}')
  inverses, changes = given["inverse_period"], given["damping_period"]
  own, factored = given["factor_damping_period"], given["damping_type"] == "factored"
  if own is not None and not (quadratic_model and factored):
    why = "quadratic_model=True" if factored else 'damping_type="factored"'
    raise ValueError(f"factor_damping_period is {own}; it needs {why}")
  if known(own) and known(inverses) and own % inverses:
    raise ValueError(
      f"factor_damping_period is {own}; allowed: a multiple of inverse_period, {inverses}, for"
      " damping of the factors acts when inverses are renewed"
    )
  factored &= adapts and own is None
  if factored and known(inverses) and known(changes) and inverses > changes:
    raise ValueError(
      f"inverse_period is {inverses}; adaptive_damping with damping_type='factored', which acts"
      f" when inverses are renewed, allows 1 to damping_period, {changes}"
    )


def check_ranges(function: Callable, **values: Any) -> None:
  """Raises a ValueError for a value that an annotated option does not take.

  Schedules of `SCHEDULED` and arrays of one number, which may be traced, are not looked at, nor are
  several patterns: `matching` does that.
  """
  for name, value in values.items():
    option = options.of(function)[name]
    if isinstance(value, type | np.dtype):
      value = jnp.dtype(value).name if name == "precondition_dtype" else value
    elif (callable(value) and name in SCHEDULED) or (option.type is not str and _one_number(value)):
      continue
    if name in ("plain", "full_factors") and not isinstance(value, str):
      if not isinstance(value, list | tuple):
        allowed = "a regular expression, or a list of them"
        raise ValueError(f"{name} is {options.shown(value)}; allowed: {allowed}")
      continue
    try:
      option.check(name, value)
    except UserError as e:
      raise ValueError(str(e)) from None


def _one_number(value: Any) -> bool:
  """Whether a value is an array of one number, maybe a traced one."""
  one = isinstance(value, jax.Array | np.ndarray) and value.shape == ()
  return one and any(jnp.issubdtype(value.dtype, kind) for kind in (np.number, np.bool_))


def matching(option: str, given: str | Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
  """The regular expressions of an option; a ValueError for one that matches no parameter."""
  patterns = ((given,) if given else ()) if isinstance(given, str) else tuple(given)
  for pattern in patterns:
    try:
      found = any(re.search(pattern, name) for name in names)
    except (re.error, TypeError) as e:
      raise ValueError(f"{option} is {pattern!r}, no regular expression: {e}") from e
    if not found:
      raise ValueError(
        f"{option} is {pattern!r}, which matches no parameter; they are {', '.join(names)}"
      )
  return patterns


def matches(patterns: Sequence[str], name: str) -> bool:
  """Whether one of the regular expressions is found in a parameter's path."""
  return any(re.search(pattern, name) for pattern in patterns)


def _check_mask(mask: Any) -> None:
  """Raises a ValueError for a mask of decay that is a text, such as a pattern, or a number."""
  if isinstance(mask, str | int | float):
    allowed = "None, a tree of bools like the parameters, or a function from parameters to it"
    raise ValueError(f"decay_mask is {options.shown(mask)}; allowed: {allowed}")


def _check_rate(rate: Any) -> None:
  """Raises a ValueError for a learning rate that is neither a number of 0 or more nor a schedule."""
  number = isinstance(rate, int | float) and not isinstance(rate, bool)
  fits = number and math.isfinite(rate) and rate >= 0
  if not (fits or callable(rate) or _one_number(rate)):
    allowed = "a number of 0 or more, or a schedule"
    raise ValueError(f"learning_rate is {options.shown(rate)}; allowed: {allowed}")


def checked(*inner: Callable) -> Callable:
  """Decorates a function whose **options are keywords of others: it has their signature.

  It refuses a keyword that none of them has, by a TypeError, and a value out of range, by a
  ValueError.
  """

  def decorate(function):
    signature = options.signature(function, *inner)

    @functools.wraps(function)
    def call(*args, **keywords):
      if unknown := sorted(keywords.keys() - signature.parameters.keys()):
        optional = [p.name for p in signature.parameters.values() if p.default is not p.empty]
        allowed = f"{unknown[0]!r}; allowed: {', '.join(optional)}"
        raise TypeError(f"{function.__name__} has no option {allowed}")
      # NumPy's numbers have a type that would be that of the state, Python's have none.
      args = tuple(map(options.plain, args))
      keywords = {name: options.plain(x) for name, x in keywords.items()}
      known = options.of(call)
      check_ranges(call, **{name: x for name, x in keywords.items() if name in known})
      given = signature.bind_partial(*args, **keywords).arguments
      rate = signature.parameters.get("learning_rate")
      if rate and given.get("learning_rate", rate.default) is not rate.default:
        _check_rate(given["learning_rate"])
      _check_mask(given.get("decay_mask"))
      if not callable(part := given.get("part")) and part is not None:
        raise ValueError(f"part is {part!r}; allowed: a function of (batch, n), or None")
      if not isinstance(mesh := given.get("mesh"), jax.sharding.Mesh | None):
        raise ValueError(f"mesh is {mesh!r}; allowed: a jax.sharding.Mesh, or None")
      if mesh is not None and given.get("axis_name") is not None:
        why = "devices of a mesh cannot share work inside of shard_map or pmap"
        raise ValueError(f"axis_name and mesh are both given; allowed: one of them, since {why}")
      return function(*args, **keywords)

    call.__signature__ = signature
    return call

  return decorate
