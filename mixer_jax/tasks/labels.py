"""Labels of training examples: their check, when data are read, and weights of classes."""

import math
from typing import Annotated, Any, Callable, Sequence

import jax
from jax.interpreters import partial_eval
import jax.numpy as jnp
import numpy as np

from mixer_jax.data.dataset import Dataset
from mixer_jax.errors import UserError, as_user_error
from mixer_jax.options import Option
from mixer_jax.runtime import draws
from mixer_jax.tasks.task import Task, Variables

BALANCED = "balanced"
ClassWeight = Annotated[
  str,
  Option(
    'weights of the classes in the training loss: "balanced", in inverse proportion to their examples,'
    ' or a number for each with commas, in their order; "": 1'
  ),
]
_MOST = 2**22  # targets of a split that are looked at, if an example has several


def of_examples(split: Dataset) -> np.ndarray:
  """The labels [n] of a training split; a UserError if only reading all examples would tell them."""
  arrays = split.arrays()
  labels = getattr(split, "labels", None) if arrays is None else arrays["label"]
  if labels is None:
    why = (
      "needs the labels, which a streamed set of TFDS has beside its images; data.stream='never'"
    )
    raise UserError(f"data.sampling='class', or class_weight='balanced', {why} reads them")
  return np.asarray(labels)


def check_weight(given: str) -> None:
  """Raises a UserError for a `ClassWeight` that is none."""
  if given not in ("", BALANCED):
    _numbers(given)


def class_weights(given: str, classes: int, counts: Callable[[], np.ndarray]) -> np.ndarray | None:
  """The weights of a `ClassWeight`, float32 [classes]; None: 1 each.

  `counts` gives the training examples of each class. "balanced" is n / (classes * counts), as in
  scikit-learn, so that all classes have the same weight together, and an example 1 in the mean. A
  class without an example counts as one with one.
  """
  if not given:
    return None
  if given == BALANCED:
    found = np.maximum(counts(), 1)
    return np.float32(found.sum() / (classes * found))
  if len(weights := _numbers(given)) != classes:
    raise UserError(f"class_weight has {len(weights)} numbers; allowed: {classes}, one a class")
  return np.float32(weights)


def weights_of_labels(
  given: str, class_names: Sequence[str], labels: Callable[[], np.ndarray]
) -> np.ndarray | None:
  """`class_weights` of the classes of training examples, whose labels [n] are read if they are needed."""
  counts = lambda: np.bincount(labels(), minlength=len(class_names))
  return class_weights(given, len(class_names), counts)


def _numbers(given: str) -> list[float]:
  with as_user_error(f"class_weight is {given!r}; allowed: '', {BALANCED!r}, numbers", ValueError):
    weights = [float(part) for part in given.strip("[]() ").split(",")]
  if not all(0 < weight < math.inf for weight in weights):
    raise UserError(f"class_weight is {given!r}; allowed: numbers above 0")
  return weights


def check(task: Task, name: str, split: Dataset, shapes: Variables) -> None:
  """Raises a UserError if a split has labels for which the model's outputs have no class.

  JAX clips such an index, or gives NaN, and training goes on. Labels are the integer targets of
  `task.predict`, whatever the examples call them; targets of weight 0 are padding. The program that
  is compiled takes of an example what its targets depend on: as a rule the label alone. A streamed
  split is left out, because it checks labels as it reads them.

  Args:
    task: of the run.
    name: of the split, for the message.
    split: the examples; of tokens or pixels with a label each some are looked at, evenly spaced.
    shapes: of the task's variables.
  """

  def predicted(variables: Variables, examples: Any) -> Any:
    batch = task.prepare(draws.key(0), examples, train=name == "train")
    return task.predict(variables, batch)

  def extremes(variables: Variables, examples: Any) -> tuple[jax.Array, jax.Array]:
    _, targets, weights, *_ = predicted(variables, examples)
    if weights is not None:
      weights = weights.reshape(weights.shape + (1,) * (targets.ndim - weights.ndim))
      targets = jnp.where(weights != 0, targets, 0)
    return jnp.min(targets), jnp.max(targets)

  if (arrays := split.arrays()) is None:
    return
  one = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype), arrays)
  try:
    outputs, targets, *_ = jax.eval_shape(predicted, shapes, one)
  except Exception:  # the contract of tasks is checked elsewhere, with messages of its own
    return
  kind = getattr(targets, "dtype", None)  # targets of an own task may be a tree
  if kind is None or not jnp.issubdtype(kind, jnp.integer) or outputs.ndim != targets.ndim + 1:
    return
  program = jax.make_jaxpr(lambda *given: predicted(*given)[1])(shapes, one)
  _, used = partial_eval.dce_jaxpr(program.jaxpr, [True])
  if any(used[: len(jax.tree.leaves(shapes))]):  # answers of a model, such as a teacher's
    return
  rows = slice(None, None, max(1, len(split) * targets.size // _MOST) if targets.size > 1 else 1)
  unread = jax.tree.map(lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape), shapes)
  low, high = jax.jit(extremes)(unread, jax.tree.map(lambda x: x[rows], arrays))
  if low < 0 or high >= outputs.shape[-1]:
    allowed = f"0 to {outputs.shape[-1] - 1}"
    raise UserError(f"the split {name!r} has labels from {low} to {high}; allowed: {allowed}")
