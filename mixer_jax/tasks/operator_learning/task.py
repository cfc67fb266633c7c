"""Operators between spaces of functions, learned from pairs of functions on grids.

Li et al., "Fourier Neural Operator", ICLR 2021, https://arxiv.org/abs/2010.08895; Cao, "Choose a
Transformer: Fourier or Galerkin", NeurIPS 2021, https://arxiv.org/abs/2105.14995.
"""

import dataclasses
import functools
import math
import pathlib
from typing import Annotated, Any, Iterable, Mapping, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from mixer_jax import models, options
from mixer_jax.data.dataset import Dataset
from mixer_jax.errors import UserError, as_user_error
from mixer_jax.options import Option, one_of
from mixer_jax.pde import function_files
from mixer_jax.pde.functions import check_step
from mixer_jax.runtime import draws
from mixer_jax.tasks.metrics import Largest, MeanOrZero, Metric, Sums, WeightedSum
from mixer_jax.tasks.operator_learning import functions, losses, normaliser, pictures
from mixer_jax.tasks.task import Aux, BaseTask, Batch, Prediction, Variables, in_batches

_LOSSES = 'mean of the relative L2 errors, "norm", or of their squares, "square"'
_H1 = (
  "gamma of the H1 term: sqrt(gamma / points of a side, the geometric mean of two) times the relative"
  " error of the slopes"
)
_LEAST = 1e-6  # smaller relative errors count as this large in K-FAC's weights
_BOUNDARY = 1e-5  # boundary values may differ by this share of the largest output


@dataclasses.dataclass(frozen=True)
class OperatorOptions:
  """Fields of the config itself."""

  loss: one_of(_LOSSES, ("norm", "square")) = "norm"
  h1: Annotated[float, Option(_H1, 0)] = 0.0
  normalise: normaliser.Kind = "none"


class OperatorLearning(BaseTask):
  """Maps functions [batch, *grid] to functions [batch, *grid], on a grid of one or two axes.

  Functions of several channels, such as a velocity, are [batch, *grid, channels]; inputs and outputs
  have their own numbers. An error is relative to all channels, |e| / |u| over all of them, and
  `relative_l2_0` and so on are those of each channel, over the functions whose channel is not 0.

  A batch is {"inputs", "outputs"}, float32. Inputs get noise, the same in every epoch, and are
  normalised. The model's answer is brought back to the scale of the outputs, in which errors are
  measured. The statistics are the collection "normaliser" of the variables. `relative_l2` is the
  mean of |e| / |u| over functions, `worst` the largest.
  """

  options = {"": OperatorOptions, "model": models.OPERATORS, "data": functions.FunctionData}
  metrics = (
    Metric("relative_l2", higher_is_better=False),
    Metric("worst", higher_is_better=False),
    Metric("loss", higher_is_better=False),
  )
  likelihood = "normal"

  def __init__(self, config: ml_collections.ConfigDict):
    self._config, self._data = config, options.made(functions.FunctionData, config.data)

  @classmethod
  def check(cls, config: ml_collections.ConfigDict) -> None:
    (data := options.made(functions.FunctionData, config.data)).check()
    if grid := data.generated_grid:
      periodic = data.periodic(len(grid))
      cells = [n - (not periodic) for n in grid]
      shape = tuple(n // data.step + (not periodic) for n in cells)
      _build(config, (shape, shape), len(shape), periodic)

  def datasets(self) -> Mapping[str, Dataset]:
    return self._splits

  @functools.cached_property
  def _loaded(self) -> functions.Loaded:
    found = functions.load(self._data)
    normaliser.warn_of_units(found.splits["train"].arrays()["outputs"], self._config.normalise)
    return found

  @property
  def _splits(self) -> Mapping[str, Dataset]:
    return self._loaded.splits

  @functools.cached_property
  def _grids(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of the training functions, inputs and outputs."""
    spec = self._splits["train"].spec
    return spec["inputs"].shape, spec["outputs"].shape

  def notes(self) -> Mapping[str, Any]:
    return {"grids": self._grids, "axes": self._axes}

  def recall(self, notes: Mapping[str, Any]) -> None:
    if "grids" in notes:
      self._grids = tuple(map(tuple, notes["grids"]))
      self._axes = notes.get("axes", len(self._grids[0]))

  @functools.cached_property
  def _axes(self) -> int:
    """Axes of the grid."""
    return self._loaded.axes

  @property
  def _grid(self) -> tuple[int, ...]:
    """The grid of the training inputs."""
    return self._grids[0][: self._axes]

  @property
  def _periodic(self) -> bool:
    return self._data.periodic(self._axes)

  @functools.cached_property
  def model(self) -> nn.Module:
    """Maps values [batch, *grid, inputs] and positions [*grid, axes] to [batch, *grid, outputs]."""
    return _build(self._config, self._grids, self._axes, self._periodic)

  def init(self, key: jax.Array) -> Variables:
    grid, model = self._grid, self.model
    variables = model.init(key, jnp.zeros((1, *grid, model.inputs)), self._positions(grid))
    if self._config.normalise != "none":
      variables = {**variables, "normaliser": self._statistics}
    if self.model.dirichlet:
      self._check_boundary(variables)
    return variables

  def _check_boundary(self, variables: Variables) -> None:
    """Raises a UserError if the model fixes outputs on the boundary, but those of train vary."""
    wanted = self._splits["train"].arrays()["outputs"]
    if wanted.shape[1:] != self._grids[1]:  # a finished run, on data of another grid
      return
    held = variables.get("normaliser", {}).get("outputs", {"mean": 0})["mean"]
    off = np.abs(wanted - held)
    off[(slice(None), *[slice(1, -1)] * self._axes)] = 0
    if off.max() > _BOUNDARY * np.abs(wanted).max():
      differ = f"those of train differ from it by up to {off.max():.3g}; allowed: False"
      raise UserError(f"model.dirichlet is True, which fixes outputs on the boundary, but {differ}")

  @functools.cached_property
  def _statistics(self) -> Mapping[str, normaliser.Statistics]:
    arrays = self._splits["train"].arrays()
    fit = functools.partial(normaliser.fit, kind=self._config.normalise, periodic=self._periodic)
    sides = zip(("inputs", "outputs"), self._grids)
    return {name: fit(arrays[name], grid=shape[: self._axes]) for name, shape in sides}

  def _positions(self, grid: tuple[int, ...]) -> jax.Array:
    """Coordinates in [0, 1] of the points of a grid, [*grid, axes]."""
    axes = [np.arange(n) / (n if self._periodic else n - 1) for n in grid]
    return jnp.asarray(np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1), jnp.float32)

  def prepare(self, key: jax.Array, examples: Any, *, train: bool) -> Batch:
    """Adds the noise of each function, drawn by `data.seed` and its id."""
    inputs, outputs = examples["inputs"], examples["outputs"]
    if self._data.noise:
      first = draws.key(self._data.seed)
      keys = jax.vmap(functools.partial(jax.random.fold_in, first))(examples["id"])
      drawn = jax.vmap(lambda key: jax.random.normal(key, inputs.shape[1:], jnp.float32))(keys)
      grid = losses.grid_of(inputs, self._axes)
      deviation = normaliser.at(self._deviation, grid, self._periodic)
      inputs = inputs + self._data.noise * deviation * drawn
    return {"inputs": inputs, "outputs": outputs}

  @functools.cached_property
  def _deviation(self) -> np.ndarray:
    """The standard deviation of the training inputs at each point."""
    inputs = self._splits["train"].arrays()["inputs"]
    return np.float32(np.std(inputs, axis=0, dtype=np.float64))

  def _answer(self, variables: Variables, inputs: jax.Array, **options: Any) -> jax.Array:
    """The operator's answer [batch, *grid(, channels)], at the points of the outputs."""
    found = self._applied(variables, inputs, **options)
    if len(self._grids[1]) == self._axes:
      found = found[..., 0]
    if every := self._data.output_step // self._data.step:
      found = found[(slice(None), *[slice(None, None, every)] * self._axes)]
    statistics = variables.get("normaliser", {}).get("outputs")
    return normaliser.denormalised(found, statistics, self._periodic, self._axes)

  def _applied(self, variables: Variables, inputs: jax.Array, **options: Any) -> Any:
    """What the model's `apply` gives for inputs, such as values [batch, *grid, outputs].

    A UserError if the model cannot take their grid.
    """
    statistics = variables.get("normaliser", {}).get("inputs")
    grid = losses.grid_of(inputs, self._axes)
    with as_user_error(f"model {self._config.model.name} on the grid {grid}", ValueError):
      values = normaliser.normalised(inputs, statistics, self._periodic, self._axes)
      values = values.reshape(len(values), *grid, -1)
      params = {"params": variables["params"]}
      return self.model.apply(params, values, self._positions(grid), **options)

  def loss(self, variables: Variables, batch: Batch, key: jax.Array) -> tuple[WeightedSum, Aux]:
    found = self._answer(variables, batch["inputs"], train=True, rngs={"dropout": key})
    sums = self._sums(found, batch["outputs"])
    return sums["loss"], Aux(sums)

  def predict(self, variables: Variables, batch: Batch) -> Prediction:
    """Functions [batch, *grid(, channels)] and the true ones."""
    return Prediction(self._answer(variables, batch["inputs"]), batch["outputs"])

  def evaluate(self, variables: Variables, batch: Batch, mask: jax.Array) -> Mapping[str, Sums]:
    return self._sums(self._answer(variables, batch["inputs"]), batch["outputs"], mask)

  def _sums(self, found: jax.Array, wanted: jax.Array, mask: Any = None) -> dict[str, Sums]:
    """Metrics of the functions for which the mask [batch] is true."""
    errors = found - wanted
    relative = losses.relative_l2(errors, wanted)
    power = 2 if self._config.loss == "square" else 1
    loss = relative**power
    if self._config.h1:
      side = math.prod(losses.grid_of(wanted, self._axes)) ** (1 / self._axes)
      weight = (self._config.h1 / side) ** (power / 2)
      loss += weight * losses.relative_h1(errors, wanted, self._periodic, self._axes) ** power
    worst = Largest.of(relative, True if mask is None else mask)
    of = functools.partial(WeightedSum.of, weights=mask)
    sums = {"relative_l2": of(relative), "worst": worst, "loss": of(loss)}
    for channel in range(self.model.outputs) if self.model.outputs > 1 else ():
      e, u = errors[..., channel], wanted[..., channel]
      own = u.any(tuple(range(1, u.ndim))) & (True if mask is None else mask)
      sums[f"relative_l2_{channel}"] = MeanOrZero.of(losses.relative_l2(e, u), own)
    return sums

  def curvature_view(self) -> Any:
    """Outputs [batch, points, channels], scaled so that their squared errors are relative ones.

    The loss of a function is |e| / |u|. Its quadratic model at e0 = e is |e|^2 / (2 |u| |e0|), which
    gives the scale. The H1 term, a small one, is left out.
    """

    def predict(variables, batch):
      found, wanted = self.predict(variables, batch)[:2]
      scale = losses.scales(wanted)
      if self._config.loss == "norm":
        relative = jax.lax.stop_gradient(losses.relative_l2(found - wanted, wanted))
        scale *= jax.lax.rsqrt(2 * jnp.maximum(relative, _LEAST))
      channels = self.model.outputs  # a row's squares are added up, not averaged
      scale *= channels**-0.5
      rows = lambda x: x.reshape(len(x), -1, channels) * scale[:, None, None]
      return Prediction(rows(found), rows(wanted))

    return predict

  decayed = staticmethod(models.is_decayed)
  layer_kind = staticmethod(models.layer_kind)

  def attended(self, variables: Variables, examples: Any) -> pictures.Attended:
    """The queries, keys and values of attention over points; {} for a model without it."""
    inputs = self.prepare(None, examples, train=False)["inputs"]
    apply = jax.jit(lambda x: self._applied(variables, x, mutable=["intermediates"])[1])
    sown = jax.device_get(apply(inputs)).get("intermediates", {})
    return pictures.attended(sown, self.model.attention_grid(losses.grid_of(inputs, self._axes)))

  def pictures(self, variables: Variables, split: Dataset) -> Mapping[str, Any]:
    arrays = split.arrays()

    @jax.jit
    def answer(examples):  # the inputs with their noise, and the answers to them
      batch = self.prepare(None, examples, train=False)
      return batch["inputs"], self.predict(variables, batch).outputs

    inputs, found = in_batches(answer, arrays, self._config.eval_batch_size)
    drawn = pictures.draw(inputs, arrays["outputs"], found, self._periodic, self._axes)
    first = {name: array[:1] for name, array in arrays.items()}
    return drawn | pictures.draw_attention(self.attended(variables, first), self._periodic)

  def export(self, variables: Variables, path: pathlib.Path) -> None:
    """Writes the parameters, and the statistics as "normaliser/inputs/mean" and so on."""
    others = {name: tree for name, tree in variables.items() if name != "params"}
    super().export({"params": {**variables["params"], **others}}, path)

  def answer(self, variables: Variables, inputs: Sequence[str]) -> Iterable[Mapping[str, Any]]:
    """The output of each input function of .npz or .mat files, one at a time.

    The inputs of an inverse problem are a file's outputs. A UserError names a file on a wrong grid.
    """
    answer, data = jax.jit(lambda x: self._answer(variables, x)), self._data
    name = data.outputs_name if data.inverse else data.inputs_name
    for path in inputs:
      form = self._axes, self._grids[0][self._axes :]
      read = function_files.read_side(path, name, data.inverse, *form)
      grid = losses.grid_of(read, self._axes)
      if every := data.output_step // data.step:
        check_step(grid, self._periodic, every, f"{path}: data.output_step / data.step")
      for i, function in enumerate(read):
        try:
          found = answer(jnp.asarray(function)[None])[0]
        except UserError as e:
          raise UserError(f"{path}: {e}") from e
        yield {"path": path, "function": i, "output": np.asarray(found).tolist()}


def _build(
  config: ml_collections.ConfigDict, shapes: Sequence[tuple[int, ...]], axes: int, periodic: bool
) -> nn.Module:
  """The model for training inputs and outputs of these shapes; a UserError if it is for other grids."""
  name, given = config.model.name, options.given(config.model)
  if axes not in (own := models.operator_axes(name)):
    allowed = " or ".join(map(str, own))
    raise UserError(
      f"model.name is {name!r}; grids have {axes} axes, allowed: {allowed} (data.grid_axes=1 takes the"
      " last axis of [n, s, c] for channels)"
    )
  inputs, outputs = (math.prod(shape[axes:]) for shape in shapes)
  model = models.operator(name, grid=shapes[0][:axes], inputs=inputs, outputs=outputs, **given)
  if periodic and model.needs_ends:
    field, allowed = model.needs_ends
    given = f"model.{field} is {getattr(model, field)!r}, for domains with ends"
    raise UserError(f"{given}, but the axes of the data are periodic; allowed: {allowed!r}")
  return model
