"""Differential equations solved by a net: the loss is made of the residuals at points.

Raissi, Perdikaris and Karniadakis, "Physics-informed neural networks" (Journal of Computational
Physics, 2019).
"""

import dataclasses
import functools
from typing import Annotated, Any, Callable, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from mixer_jax import models, options
from mixer_jax.data.dataset import Arrays, Dataset
from mixer_jax.errors import UserError, as_user_error, check_list
from mixer_jax.options import Option, one_of
from mixer_jax.runtime import precision
from mixer_jax.tasks.metrics import Largest, Metric, RootMeanSquare, Sums, WeightedSum
from mixer_jax.tasks.physics import balance, pictures, points
from mixer_jax.tasks.physics.equations import PROBLEMS
from mixer_jax.tasks.physics.problem import Function, Grid, Problem
from mixer_jax.tasks.task import Aux, BaseTask, Batch, Prediction, Variables, in_batches

_EQUATION = "equation"  # the name of learned parameters among those of the net
_FLOAT64 = "parameters, points, states and metrics in float64; JAX's switch is set at the start"
_SETS = "sets of points, drawn by the seed; an epoch has a step of each; 1: the points are fixed"
_POINTS = "points of each term, in the order of the problem; (): its own numbers"
_WEIGHTS = "weights of the terms, in the order of the problem; (): its own"
_BALANCE = "further weights, which make the gradients of all terms equally long"


@dataclasses.dataclass(frozen=True)
class PhysicsOptions:
  """Fields of the config itself."""

  float64: Annotated[bool, Option(_FLOAT64)] = False
  sets: Annotated[int, Option(_SETS, 1, 10**6)] = 1
  steps_a_set: Annotated[int, Option("steps on a set of points before another", 1)] = 1
  points: Annotated[tuple[int, ...], Option(_POINTS, 1, 10**8)] = ()
  weights: Annotated[tuple[float, ...], Option(_WEIGHTS, 0)] = ()
  test_points: Annotated[
    int, Option("points of evaluation, where no reference gives them", 1, 10**8)
  ] = 10_000
  balance: one_of(_BALANCE, ("none", "gradient_norms")) = "none"
  balance_period: Annotated[int, Option("steps between changes of these", 1)] = 1000
  balance_decay: Annotated[float, Option("decay of their averages", 0, 0.99999)] = 0.9
  cache_dir: Annotated[
    str, Option('directory of computed references; "": the user\'s own', free=True)
  ] = ""


class Physics(BaseTask):
  """A net [dim] -> [functions] that solves an equation, a `Problem`.

  A training batch is a mapping from each term to its rows [n, columns]; its loss is the sum over
  terms of weight times the mean over rows of the squares of residuals, without one half.
  `relative_l2` is |e| / |u| over all points of evaluation and functions that are known, `rmse` the root
  of the mean square of e, `max_error` the largest |e|. The means of squares of the residuals there
  are `residual_NAME`, the loss of them `loss`; learned parameters are told by their names.
  """

  options = {"": PhysicsOptions, "model": models.POINT_NETS, "problem": PROBLEMS}
  metrics: Any = (
    Metric("relative_l2", higher_is_better=False),
    Metric("rmse", higher_is_better=False),
    Metric("max_error", higher_is_better=False),
    Metric("loss", higher_is_better=False),
  )

  def __init__(self, config: ml_collections.ConfigDict):
    precision.take(config)
    self._config, self.problem = config, _problem(type(self).options["problem"], config)
    self._dtype = np.float64 if config.float64 else np.float32
    self._seed, self.repeats = config.seed, config.steps_a_set
    terms = self.problem.terms
    weights = config.weights or [term.weight for term in terms.values()]
    self._weights = dict(zip(terms, map(float, weights), strict=True))
    self._counts = dict(zip(terms, config.points or [term.count for term in terms.values()]))
    self.likelihood = {name: (weight, "normal") for name, weight in self._weights.items()}
    self.model = _net(config, self.problem, self._dtype)

  @classmethod
  def check(cls, config: ml_collections.ConfigDict) -> None:
    problem = _problem(cls.options["problem"], config)
    names = ", ".join(problem.terms)
    for field in ("points", "weights"):
      if (given := config[field]) and len(given) != len(problem.terms):
        allowed = f"{len(problem.terms)} numbers, of {names}"
        raise UserError(f"{field} is {tuple(given)}; allowed: () or {allowed}")
    if config.sets % config.steps_a_set:
      allowed = f"divisors of sets, {config.sets}"
      raise UserError(f"steps_a_set is {config.steps_a_set}; allowed: {allowed}")
    if any(count % 1 for count in config.points):
      raise UserError(f"points is {tuple(config.points)}; allowed: integers")
    _net(config, problem, np.float32)

  def datasets(self) -> Mapping[str, Dataset]:
    return self._splits

  @functools.cached_property
  def _splits(self) -> Mapping[str, Arrays]:
    config, problem = self._config, self.problem
    train = points.train_split(problem, self._counts, config.sets, self._seed, self._dtype)
    given = self._reference, config.test_points, self._dtype
    return {"train": train, "test": points.test_split(problem, *given)}

  @functools.cached_property
  def _reference(self) -> Grid | None:
    """The problem's reference, if it has one."""
    made = self.problem.reference
    return None if made is None else made(self._config.cache_dir)

  def init(self, key: jax.Array) -> Variables:
    variables = dict(self.model.init(key, jnp.zeros(self.problem.domain.dim, self._dtype)))
    learned = {}
    for name, parameter in self.problem.learned.items():
      raw = np.log(parameter.start) if parameter.positive else parameter.start
      learned[name] = jnp.asarray(raw, self._dtype)
    if learned:
      variables["params"] = {**variables["params"], _EQUATION: learned}
    if self._config.balance != "none":
      variables[balance.COLLECTION] = balance.start(self.problem.terms, self._dtype)
    self._check_shapes(variables)
    return variables

  def _check_shapes(self, variables: Variables) -> None:
    """Raises a UserError for a residual or a solution of another shape than is allowed."""
    u, raw = self._solved(variables)
    rows = {name: x[0, 0] for name, x in self._splits["train"].arrays().items()}
    for name, row in rows.items():
      found = jax.eval_shape(lambda row, name=name: self.problem.residual(name, u, row, raw), row)
      if found.ndim != 1 or not jnp.issubdtype(found.dtype, jnp.floating):
        raise UserError(
          f"the residual {name!r} of a point is {found.dtype.name}{list(found.shape)};"
          " allowed: a number [], or several [k]"
        )
    value = jax.eval_shape(u, rows[name][: self.problem.domain.dim])
    known = self._splits["test"].spec.get("value")
    wanted = () if len(self.problem.functions) == 1 else (len(self.problem.functions),)
    if value.shape != wanted:
      allowed = f"{list(wanted)}, of {', '.join(self.problem.functions)}"
      raise UserError(f"the solution at a point has shape {list(value.shape)}; allowed: {allowed}")
    if known is not None and not 0 < known.shape[0] <= len(self.problem.functions):
      raise UserError(
        f"the exact solution has {known.shape[0]} functions; allowed: up to"
        f" {len(self.problem.functions)}, {', '.join(self.problem.functions)}"
      )

  def prepare(self, key: jax.Array, examples: Any, *, train: bool) -> Batch:
    """All sets of points of a batch together, {term: [n, columns]}; points of evaluation as is."""
    if not train:
      return examples
    return {name: x.reshape(-1, x.shape[-1]) for name, x in examples.items()}

  def _solved(self, variables: Variables) -> tuple[Function, Mapping[str, jax.Array]]:
    """The solution, and the trained numbers behind the learned parameters."""
    params = dict(variables["params"])
    raw = params.pop(_EQUATION, {})
    net = {"params": params}
    if "constants" in variables:
      net["constants"] = variables["constants"]
    return self.problem.solution(lambda x: self.model.apply(net, x)), raw

  def residuals(self, variables: Variables, rows: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The residuals [n, k] of each term at its rows [n, columns] (traceable)."""
    u, raw = self._solved(variables)
    of = lambda name: jax.vmap(lambda row: self.problem.residual(name, u, row, raw))
    return {name: of(name)(x) for name, x in rows.items()}

  def _total(self, means: Mapping[str, jax.Array], variables: Variables) -> jax.Array:
    """The loss of the terms' means of squares."""
    state = variables.get(balance.COLLECTION)
    more = lambda name: 1.0 if state is None else state["weights"][name]
    return sum(self._weights[name] * more(name) * mean for name, mean in means.items())

  def loss(self, variables: Variables, batch: Batch, key: jax.Array) -> tuple[WeightedSum, Aux]:
    def means(params):
      found = self.residuals({**variables, "params": params}, batch)
      return {name: jnp.mean(jnp.sum(jnp.square(r), axis=1)) for name, r in found.items()}

    terms, one = means(variables["params"]), jnp.ones((), self._dtype)
    loss = WeightedSum(self._total(terms, variables), one)
    sums = {"loss": loss} | {f"residual_{k}": WeightedSum(x, one) for k, x in terms.items()}
    changed = {}
    if state := variables.get(balance.COLLECTION):
      weighted = lambda params: {k: self._weights[k] * x for k, x in means(params).items()}
      config = self._config
      given = variables["params"], weighted, config.balance_period, config.balance_decay
      changed[balance.COLLECTION] = balance.renewed(state, *given)
    return loss, Aux(sums, changed)

  def curvature_view(self) -> Callable[[Variables, Batch], Mapping[str, jax.Array]]:
    """The residuals, whose weighted squares are the loss."""

    def predict(variables, batch):
      found, state = self.residuals(variables, batch), variables.get(balance.COLLECTION)
      if state is None:
        return found
      return {name: jnp.sqrt(state["weights"][name]) * r for name, r in found.items()}

    return predict

  def predict(self, variables: Variables, batch: Batch) -> Prediction:
    """The functions [n, functions] at points of evaluation, and the known ones."""
    u, _ = self._solved(variables)
    found = jax.vmap(lambda x: jnp.atleast_1d(u(x)))(batch["point"])
    return Prediction(found, batch.get("value"))

  def evaluate(self, variables: Variables, batch: Batch, mask: jax.Array) -> Mapping[str, Sums]:
    sums: dict[str, Sums] = {}
    found, wanted, *_ = self.predict(variables, batch)
    if wanted is not None:
      sums |= self._errors(found[:, : wanted.shape[1]] - wanted, wanted, mask)
    squares = {
      name: WeightedSum.of(jnp.sum(jnp.square(r), axis=1), mask)
      for name, r in self.residuals(variables, batch["terms"]).items()
    }
    weight = next(iter(squares.values())).weight
    total = self._total({name: x.total for name, x in squares.items()}, variables)
    sums["loss"] = WeightedSum(total, weight)
    sums |= {f"residual_{name}": x for name, x in squares.items()}
    for name, value in self.learned(variables).items():
      sums[name], true = WeightedSum(weight * value, weight), self.problem.learned[name].true
      if true is not None:
        sums[f"error_{name}"] = WeightedSum(weight * jnp.abs(value / true - 1), weight)
    return sums

  def _errors(self, errors: jax.Array, wanted: jax.Array, mask: jax.Array) -> dict[str, Sums]:
    """Metrics of errors [n, functions] where a mask [n] holds."""
    own = mask[:, None]
    of = lambda x: RootMeanSquare.of(jnp.square(x), own)
    relative = lambda e, u: RootMeanSquare(of(e).total, of(u).total)
    sums = {"relative_l2": relative(errors, wanted), "rmse": of(errors)}
    sums["max_error"] = Largest.of(jnp.abs(errors), own)
    if len(self.problem.functions) > 1:
      for i, name in enumerate(self.problem.functions[: errors.shape[1]]):
        column = slice(i, i + 1)
        sums[f"relative_l2_{name}"] = relative(errors[:, column], wanted[:, column])
    return sums

  def learned(self, variables: Variables) -> dict[str, jax.Array]:
    """The learned parameters of the equation."""
    return self.problem.values(self._solved(variables)[1])

  def answer(self, variables: Variables, inputs: Sequence[str]) -> Iterable[Mapping[str, Any]]:
    """The functions [n, functions] at the array "points" [n, dim] of each .npz file."""
    check_list(inputs, "paths")
    u = jax.jit(jax.vmap(lambda x: jnp.atleast_1d(self._solved(variables)[0](x))))
    for path in inputs:
      x = points.read(path, self.problem.domain).astype(self._dtype)
      found = in_batches(u, x, self._config.eval_batch_size)
      yield {"path": path, "solution": found.tolist()}

  def layer_kind(self, path: str) -> str:
    return _EQUATION if path.startswith(f"{_EQUATION}/") else "net"

  def pictures(self, variables: Variables, split: Dataset) -> Mapping[str, Any]:
    arrays = split.arrays()
    u = jax.jit(jax.vmap(lambda x: jnp.atleast_1d(self._solved(variables)[0](x))))
    residuals = jax.jit(functools.partial(self.residuals, variables))
    size = self._config.eval_batch_size
    return pictures.draw(self.problem, self._reference, u, residuals, arrays, size)


def _problem(made_of: options.Group, config: ml_collections.ConfigDict) -> Problem:
  if isinstance(made_of, Mapping):
    made_of = options.chosen(config.problem, made_of, "problem")
  return options.made(made_of, config.problem)


def _net(config: ml_collections.ConfigDict, problem: Problem, dtype: Any) -> Any:
  domain = problem.domain
  given = dict(low=tuple(domain.low), high=tuple(domain.high), periods=tuple(problem.periods))
  given |= dict(functions=len(problem.functions), param_dtype=dtype)
  with as_user_error(f"model {config.model.name}", ValueError):
    return models.POINT_NETS[config.model.name](**given, **options.given(config.model))


def task(problem: Callable[..., Problem]) -> type[Physics]:
  """The task of an equation of one's own, for `config.task`.

  `problem` makes it; its keywords that are annotated by an `Option` are fields of `config.problem`.
  Without a solution the loss is the primary metric.
  """
  found = Physics.metrics if problem().solved else Physics.metrics[-1:]
  own = {"options": {**Physics.options, "problem": problem}, "metrics": found}
  return type("Own" + problem.__name__.title().replace("_", ""), (Physics,), own)
