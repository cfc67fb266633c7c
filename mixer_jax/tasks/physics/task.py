"""A net solves a differential equation: the loss is made of the residuals at points.

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
from mixer_jax.data.dataset import Dataset
from mixer_jax.errors import UserError, as_user_error
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

  A training batch maps each term to its rows [n, columns]. The loss is the sum over terms of weight
  times the mean over rows of the squared residuals, without one half.

  `relative_l2` is |e| / |u| over all points of evaluation and known functions, `rmse` the root mean
  square of e, `max_error` the largest |e|. `residual_NAME` is the mean of a term's squared residuals
  there, `loss` their weighted sum. A learned parameter is a metric of its own name.
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
    self.repeats, terms = config.steps_a_set, self.problem.terms
    weights = config.weights or [term.weight for term in terms.values()]
    self._weights = dict(zip(terms, map(float, weights), strict=True))
    self.likelihood = {name: (weight, "normal") for name, weight in self._weights.items()}
    domain, given = self.problem.domain, options.given(config.model)
    with as_user_error(f"model {config.model.name}", ValueError):
      self.model = models.POINT_NETS[config.model.name](
        low=tuple(domain.low),
        high=tuple(domain.high),
        periods=tuple(self.problem.periods),
        functions=len(self.problem.functions),
        param_dtype=self._dtype,
        **given,
      )

  @classmethod
  def check(cls, config: ml_collections.ConfigDict) -> None:
    terms = _problem(cls.options["problem"], config).terms
    for field in ("points", "weights"):
      if (given := config[field]) and len(given) != len(terms):
        allowed = f"() or {len(terms)} numbers, for {', '.join(terms)}"
        raise UserError(f"{field} is {tuple(given)}; allowed: {allowed}")
    if config.sets % config.steps_a_set:
      allowed = f"divisors of sets, {config.sets}"
      raise UserError(f"steps_a_set is {config.steps_a_set}; allowed: {allowed}")

  def datasets(self) -> Mapping[str, Dataset]:
    config, terms = self._config, self.problem.terms
    counts = dict(zip(terms, config.points or [term.count for term in terms.values()]))
    train = self.problem, counts, config.sets, config.seed, self._dtype
    test = self.problem, self._reference, config.test_points, self._dtype
    return {"train": points.training_split(*train), "test": points.evaluation_split(*test)}

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
    return variables

  def prepare(self, key: jax.Array, examples: Any, *, train: bool) -> Batch:
    """Joins the sets of points of a training batch, {term: [n, columns]}."""
    if not train:
      return examples
    return {name: x.reshape(-1, x.shape[-1]) for name, x in examples.items()}

  def _solved(self, variables: Variables) -> tuple[Function, Mapping[str, jax.Array]]:
    """The solution, and the trained numbers behind the learned parameters."""
    params = dict(variables["params"])
    raw = params.pop(_EQUATION, {})
    net = {name: tree for name, tree in variables.items() if name == "constants"} | {
      "params": params
    }
    return self.problem.solution(lambda x: self.model.apply(net, x)), raw

  def _values(self, variables: Variables) -> Callable[[np.ndarray], np.ndarray]:
    """The solution as a function of points [n, dim], [n, functions]."""
    u = jax.jit(jax.vmap(lambda x: jnp.atleast_1d(self._solved(variables)[0](x))))
    return lambda x: in_batches(u, x, self._config.eval_batch_size)

  def residuals(self, variables: Variables, rows: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The residuals [n, k] of each term at its rows [n, columns] (traceable)."""
    u, raw = self._solved(variables)
    of = lambda name: jax.vmap(lambda row: self.problem.residual(name, u, row, raw))
    return {name: of(name)(x) for name, x in rows.items()}

  def _total(self, means: Mapping[str, jax.Array], variables: Variables) -> jax.Array:
    """The loss, from the mean of squares of each term."""
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
    """The functions [n, functions] at points of evaluation, and the known values."""
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
    """Metrics of errors [n, functions] at the points where the mask [n] is true."""
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
    u = self._values(variables)
    for path in inputs:
      x = points.read(path, self.problem.domain).astype(self._dtype)
      yield {"path": path, "solution": u(x).tolist()}

  def layer_kind(self, path: str) -> str:
    return _EQUATION if path.startswith(f"{_EQUATION}/") else "net"

  def pictures(self, variables: Variables, split: Dataset) -> Mapping[str, Any]:
    arrays, residuals = split.arrays(), jax.jit(functools.partial(self.residuals, variables))
    found = in_batches(residuals, arrays["terms"], self._config.eval_batch_size)
    u = self._values(variables)
    return pictures.draw(self.problem, self._reference, u, found, arrays)


def _problem(made_of: options.Group, config: ml_collections.ConfigDict) -> Problem:
  if isinstance(made_of, Mapping):
    made_of = options.chosen(config.problem, made_of, "problem")
  return options.made(made_of, config.problem)


def task(problem: Callable[..., Problem]) -> type[Physics]:
  """The task of a user's own equation, for `config.task`.

  If the solution is not known, the loss is the primary metric.

  Args:
    problem: makes the equation. Its keywords annotated with an `Option` are fields of
      `config.problem`.

  Returns:
    A class to be named in a module: `config.task` is "module:Name".

  Example:
    After the example of `Problem`:

    ```python
    from mixer_jax import config as config_lib

    def parabola():
      return problem

    Parabola = physics.task(parabola)
    config = config_lib.default("docs.own_equation:Helmholtz", "mlp")  # one that is made so
    ```
  """
  found = Physics.metrics if problem().solved else Physics.metrics[-1:]
  own = {"options": {**Physics.options, "problem": problem}, "metrics": found}
  return type("Own" + problem.__name__.title().replace("_", ""), (Physics,), own)
