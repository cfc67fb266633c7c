"""The programs of a function, for batches of any shapes, and what is found in each."""

import dataclasses
from typing import Any, Iterable

import jax

from mixer_jax.optim import axes
from mixer_jax.optim.curvature import check, program, report
from mixer_jax.optim.curvature.predictor import Predictor
from mixer_jax.optim.curvature.traced import Choices, Traced, build


class Programs:
  """Traces a function once for each shape of a batch.

  Args:
    predictor: the function.
    params: shapes of the parameters.
    choices: options that decide on blocks.
    in_axes: of examples, see `curvature.Curvature`.
    axis_name: see there.
  """

  def __init__(
    self, predictor: Predictor, params: Any, choices: Choices, in_axes: Any, axis_name: Any
  ):
    self.predictor, self.choices = predictor, choices
    self._params, self._in_axes, self._axis_name = params, in_axes, axis_name
    self._traces: dict[Any, Traced] = {}

  def of(self, batch: Any) -> Traced:
    """The programs of a batch of these shapes; a ValueError if its layers are other ones."""
    leaves, structure = jax.tree.flatten(jax.eval_shape(lambda x: x, batch))
    key = structure, tuple((x.shape, x.dtype) for x in leaves), axes.is_checked()
    if key not in self._traces:
      parts = tuple(self.predictor.likelihood.inner or ())
      own = self.predictor, self._params, structure.unflatten(leaves), self._in_axes, parts
      new = build(program.terms(*own, self._axis_name), self._params, self.choices)
      check.same_blocks(next(iter(self._traces.values()), new).blocks, new.blocks)
      self._traces[key] = new
    return self._traces[key]

  def first(self) -> Traced:
    """Those of the first batch."""
    return next(iter(self._traces.values()))

  def taken(self, batch: Any, part: slice) -> Any:
    """Some examples of a batch; all of one that is a whole."""
    return program.taken(batch, self._in_axes, part)

  def retrace(self, in_axes: Any, failed: Iterable[str] = ()) -> None:
    """Begins anew with other axes of examples, and without the layers of some kernels."""
    self._in_axes, self._traces = in_axes, {}
    self.choices = dataclasses.replace(self.choices, failed=frozenset(failed))

  def check(self, params: Any, batch: Any) -> None:
    """Compares the gradients of all layers with autodiff's; what fails has no layer.

    A program of one example fails where examples mix: then the whole batch is traced.
    """
    in_axes, failing = self._in_axes, check.failing(self, params, batch)
    if failing and in_axes is not None:
      self.retrace(None)
      if not (mixed := check.failing(self, params, batch)):
        report.say(
          "the outputs of an example depend on the other ones, so curvature takes the batch as a whole;"
          " in_axes=None says so"
        )
        return
      if len(mixed) >= len(failing):
        self.retrace(in_axes)
      else:
        failing, in_axes = mixed, None
    if failing:
      self.retrace(in_axes, failing)
      report.say(f"the rows of {', '.join(sorted(failing))} do not give their gradients: no layers")
