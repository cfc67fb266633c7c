"""The group `config.data` of operator learning, and the splits of functions that it names."""

import dataclasses
import functools
import logging
import pathlib
from typing import Annotated, Callable, Mapping, NamedTuple
import zlib

import numpy as np

from mixer_jax import options
from mixer_jax.data import further, splits
from mixer_jax.data.dataset import Arrays
from mixer_jax.errors import UserError
from mixer_jax.models.spectral import shown
from mixer_jax.options import Option, one_of
from mixer_jax.pde import function_files, generate
from mixer_jax.pde.functions import Functions, check_step, subsampled
from mixer_jax.tasks.operator_learning.losses import grid_of

_LOG = logging.getLogger(__name__)
_NAMES = (*generate.KINDS, "files")
_SPLIT = '"train" or "test", or a .mat or .npz below dir; maybe a part: "train[:90%]"'
_EXTRA = 'the test set on other grids too, by their steps, such as "4,1"'
_OUTPUT_STEP = "inverse problem: step of the outputs, means over cells; 0: as `step`"
_NOISE = (
  "noise on the inputs, a share of their standard deviation at each point; a function has its own on"
  " each grid"
)
_ARRAY = 'of the array in files, those that `predict` answers too; "": Li et al.\'s'
_AXES = (
  'axes of files: "periodic", without the end point, "bounded", with it, or "auto": a single axis is'
  " periodic, two are bounded"
)
_GRID_AXES = (
  "axes of the grid in files; the last axis of an array with one more has channels; 0: by the shapes, so"
  " that [n, s, s] has two axes"
)
_AT_ONCE = 64  # functions averaged, or looked at, together
_MOST_LOST = 1e-2  # a larger change by rounding, as a share of the deviation, is reported
_ZERO = 1e-37  # the largest value of an output that counts as 0 everywhere
_BURGERS, _DARCY = (options.of(generate.KINDS[name].make) for name in ("burgers", "darcy"))


@dataclasses.dataclass(frozen=True)
class FunctionData:
  """Functions that are generated, or read from files."""

  name: one_of('an equation, or "files"', _NAMES) = "burgers"
  dir: Annotated[str, Option("folder of the files", free=True)] = ""
  cache_dir: Annotated[str, Option('of generated functions; "": ~/.cache/mixer_jax', free=True)] = (
    ""
  )
  train_split: Annotated[str, Option(_SPLIT)] = "train"
  test_split: Annotated[str, Option("test set, written as train_split")] = "test"
  validation_split: Annotated[str, Option('picks the checkpoint; "": the test split does')] = ""
  test_sets: further.option("a .mat or .npz, of which data.step takes points as of the others") = ""
  train_functions: Annotated[int, Option('generated as "train"', 1, generate.COUNT.high)] = 1024
  test_functions: Annotated[int, Option('generated as "test"', 1, generate.COUNT.high)] = 100
  points: Annotated[
    int, Option("generated points a side; 0: 8,192 (Burgers), 421 (Darcy)", 0, 2**16)
  ] = 0
  viscosity: Annotated[float, _BURGERS["viscosity"]] = _BURGERS["viscosity"].default
  time: Annotated[float, _BURGERS["time"]] = _BURGERS["time"].default
  length: Annotated[float, _BURGERS["length"]] = _BURGERS["length"].default
  mean: Annotated[float, _BURGERS["mean"]] = _BURGERS["mean"].default
  low: Annotated[float, _DARCY["low"]] = _DARCY["low"].default
  high: Annotated[float, _DARCY["high"]] = _DARCY["high"].default
  seed: Annotated[int, Option("random seed of generated functions and of noise", 0)] = 0
  step: Annotated[int, Option("every step-th point of a side is taken", 1, 2**16)] = 1
  output_step: Annotated[int, Option(_OUTPUT_STEP, 0, 2**16)] = 0
  extra_test_steps: Annotated[str, Option(_EXTRA, free=True)] = ""
  inverse: Annotated[bool, Option("from the solution to the coefficient")] = False
  noise: Annotated[float, Option(_NOISE, 0, 10)] = 0.0
  inputs_name: Annotated[str, Option(_ARRAY, free=True)] = ""
  outputs_name: Annotated[str, Option(_ARRAY, free=True)] = ""
  axes: one_of(_AXES, ("auto", "periodic", "bounded")) = "auto"
  grid_axes: Annotated[int, Option(_GRID_AXES, 0, 2)] = 0

  @property
  def split_specs(self) -> dict[str, str]:
    """The split strings by the name of the split."""
    return splits.by_name(self.train_split, self.test_split, self.validation_split)

  @property
  def extra_steps(self) -> list[int]:
    """The steps of the further test grids, without the test set's own; a UserError if not numbers."""
    given = [step.strip() for step in self.extra_test_steps.split(",") if step.strip()]
    if not all(step.isdecimal() and int(step) for step in given):
      allowed = "steps of 1 or more, separated by commas"
      raise UserError(f"data.extra_test_steps is {self.extra_test_steps!r}; allowed: {allowed}")
    return [step for step in dict.fromkeys(map(int, given)) if step != self.step]

  @property
  def further_sets(self) -> dict[str, further.Place]:
    """Files of the test sets of other sources, by name."""
    return further.places(self.test_sets, splits.OWN)

  @property
  def generated_grid(self) -> tuple[int, ...]:
    """The grid on which functions are generated; () for files."""
    if self.name == "files":
      return ()
    kind = generate.KINDS[self.name]
    return (self.points or kind.points,) * kind.dimensions

  def periodic(self, dimensions: int) -> bool:
    """Whether grids of so many axes leave out the end point, which equals the first."""
    if self.name != "files":
      return generate.KINDS[self.name].periodic
    return self.axes == "periodic" or (self.axes == "auto" and dimensions == 1)

  def check(self) -> None:
    """Raises a UserError for fields that contradict each other, before functions are generated."""
    grid, extra, _ = self.generated_grid, self.extra_steps, self.further_sets
    if grid and self.dir:
      raise UserError(f"data.dir is {self.dir!r}, which {self.name!r} does not read; 'files' would")
    if self.output_step and (extra or not self.inverse or self.output_step % self.step):
      needed = "data.inverse=True, no data.extra_test_steps, and a multiple of data.step"
      raise UserError(f"data.output_step is {self.output_step}; it needs {needed}")
    for step in (self.step, self.output_step or self.step, *extra):
      check_step(grid, self.periodic(len(grid)), step)


class Loaded(NamedTuple):
  """The splits by name, and the number of axes of the grid."""

  splits: Mapping[str, Arrays]
  axes: int


def load(data: FunctionData) -> Loaded:
  """The splits: {"inputs": [*grid], "outputs": [*grid], float32, "id": uint32}; or [*grid, channels].

  Beside "train", "test" and maybe "validation" there is a "test_POINTS" for each further grid. The
  id of a function depends on its place in the generated split or file alone. A UserError if files
  do not fit, a step does not divide a grid, validation functions are trained on, or an output is 0
  everywhere.
  """
  read = functools.cache(functools.partial(_read, data))
  number = lambda base: len(read(base))
  parts = splits.checked_parts(data.split_specs, number, data.further_sets)
  found = {name: _taken(data, read, part, data.step) for name, part in parts.items()}
  whole, train = read(parts["train"][0][0]), found["train"]["inputs"]
  ends = "periodic" if whole.periodic else "with its ends"
  sizes = f"{shown(train.shape[1 : 1 + len(whole.grid)])} of {shown(whole.grid)} points (data.step={data.step})"
  _LOG.info("%s functions on %s, %s", f"{len(train):,}", sizes, ends)
  for step in data.extra_steps:
    arrays = _taken(data, read, parts["test"], step)
    found[f"test_{arrays['inputs'].shape[1]}"] = arrays
  channels = lambda arrays: [arrays[x].shape[1 + len(whole.grid) :] for x in ("inputs", "outputs")]
  for name, arrays in found.items():
    if (own := channels(arrays)) != (trained := channels(found["train"])):
      told = f"channels of inputs and outputs of {name} are {own}, and {trained} of train"
      raise UserError(f"{told}; allowed: the same")
    outputs = arrays["outputs"].reshape(len(arrays["outputs"]), -1)
    zero = np.maximum(outputs.max(1), -outputs.min(1)) < _ZERO
    if zero.any():
      why = "is 0 at all points, where it has no relative error"
      raise UserError(f"outputs of {name}: function {zero.argmax()} {why}")
  return Loaded({name: Arrays(arrays) for name, arrays in found.items()}, len(whole.grid))


def _read(data: FunctionData, base: str) -> Functions:
  """All functions of a base split, on their own grid."""
  if data.name == "files" or isinstance(base, further.Place):
    path = base if isinstance(base, further.Place) else str(pathlib.Path(data.dir) / base)
    found = function_files.read(path, data.inputs_name, data.outputs_name, data.grid_axes)
    return dataclasses.replace(found, periodic=data.periodic(len(found.grid)))
  counts = {"train": data.train_functions, "test": data.test_functions}
  if base not in counts:
    raise UserError(f"{data.name} has no split {base!r}; allowed: train, test")
  kind = generate.KINDS[data.name]
  physics = {name: getattr(data, name) for name in options.of(kind.make)}
  points = data.points or kind.points
  return generate.load(data.name, base, counts[base], data.seed, points, data.cache_dir, **physics)


def _taken(
  data: FunctionData, read: Callable[[str], Functions], parts: splits.Parts, step: int
) -> dict[str, np.ndarray]:
  """Inputs and outputs of some rows on a coarser grid, in the order of the problem."""
  taken = {"inputs": [], "outputs": [], "id": []}
  for base, rows in parts:
    whole, some = read(base), slice(rows.start, rows.stop)
    fine = dataclasses.replace(whole, inputs=whole.inputs[some], outputs=whole.outputs[some])
    coarse = subsampled(fine, step)
    inputs, outputs = coarse.inputs, coarse.outputs
    if data.inverse:
      inputs, outputs = outputs, inputs
      if wide := data.output_step:
        check_step(fine.grid, fine.periodic, wide, "output_step", step)
        outputs = averaged(fine.inputs, wide, fine.periodic, fine.axes)
    taken["inputs"].append(_in_float32(inputs, f"inputs of {base}"))
    taken["outputs"].append(_in_float32(outputs, f"outputs of {base}"))
    ids = zlib.crc32(base.encode()) + np.arange(rows.start, rows.stop)
    taken["id"].append(ids.astype(np.uint32))
  return {name: np.concatenate(arrays) for name, arrays in taken.items()}


def _in_float32(functions: np.ndarray, where: str) -> np.ndarray:
  """Rounds functions; warns if that changes them by over a hundredth of their deviation."""
  rounded = np.asarray(functions, np.float32)
  some = np.asarray(functions[:_AT_ONCE], np.float64)
  deviation, lost = some.std(), np.abs(some - rounded[:_AT_ONCE]).max()
  if lost > _MOST_LOST * deviation > 1e-12 * np.abs(some).max():  # constants have no deviation
    rounds = f"float32 rounds by up to {lost:.1g}, and they have a deviation of {deviation:.1g}"
    _LOG.warning("%s: %s; subtract their mean in the file", where, rounds)
  return rounded


def averaged(
  functions: np.ndarray, step: int, periodic: bool, axes: int | None = None
) -> np.ndarray:
  """Functions (`losses.grid_of`) at every step-th point, the mean over its cell, `step` wide.

  Points on the edge between two cells count half in both. Cells are cut at the ends of the domain,
  and points there count in full.
  """
  means = []
  for points in grid_of(functions, axes):
    distance = np.abs(np.arange(points)[None] - np.arange(0, points, step)[:, None])
    distance = np.minimum(distance, points - distance) if periodic else distance
    weights = np.clip((step + 1 - 2 * distance) / 2, 0, 1)
    means.append((weights / weights.sum(1, keepdims=True)).astype(np.float32))
  parts = []
  for start in range(0, len(functions), _AT_ONCE):  # a set may be larger than memory
    part = functions[start : start + _AT_ONCE]
    for axis, weights in enumerate(means, 1):
      part = np.moveaxis(np.tensordot(part, weights, (axis, 1)), -1, axis)
    parts.append(part)
  return np.concatenate(parts)
