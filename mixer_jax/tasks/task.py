"""The contract between a task and the commands, which know nothing else of it.

A task defines its examples, loss, metrics and pictures. It is built from the whole config. Its name
is a key of `TASKS`, or "module.path:Class" outside the package; `docs/own_task.md` builds one.
"""

import functools
import importlib
import pathlib
from typing import (
  Any,
  Callable,
  ClassVar,
  Iterable,
  Iterator,
  Mapping,
  NamedTuple,
  Protocol,
  Sequence,
)

import jax
import ml_collections
import numpy as np

from mixer_jax.data import order
from mixer_jax.data.dataset import Dataset
from mixer_jax.errors import UserError, as_user_error, until_error
from mixer_jax.options import Group, shown
from mixer_jax.pretrained import containers
from mixer_jax.runtime import draws
from mixer_jax.tasks.metrics import Metric, Sums, WeightedSum

# {"params": the trained parameters, other names: collections that are not trained}
Variables = Mapping[str, Any]
Batch = Any
# Maps the path of a run to its config and the variables of its latest checkpoint, or raises UserError.
ReadRun = Callable[[str], tuple[ml_collections.ConfigDict, Variables]]


class Aux(NamedTuple):
  """What a loss returns beside its sum.

  Attributes:
    metrics: sums of the batch's metrics by name.
    collections: collections of variables that changed, by name; others stay.
  """

  metrics: Mapping[str, Sums]
  collections: Mapping[str, Any] = {}


class Prediction(NamedTuple):
  """The answer of a model to a batch.

  Attributes:
    outputs: logits of a "categorical", means of a "normal" distribution, [batch, n] or [batch,
      tokens, n].
    targets: int labels [batch] or [batch, tokens], or float targets like the outputs.
    weights: loss weights, [batch] or [batch, tokens] (for "normal" also of the outputs' shape);
      padding has 0. None: all are 1.
    tokens: for sequences with one answer each, bool [batch, tokens], False for padding.
  """

  outputs: jax.Array
  targets: Any
  weights: Any = None
  tokens: Any = None


class Task(Protocol):
  """The contract of a task: what every task has; `BaseTask` has the parts that may be left out.

  A task is built from the whole config of a run.

  Attributes:
    options: the groups of the config that are the task's own, by name: a function, a dataclass or a
      module whose keywords have an `Option`, or a mapping of several by name. The name "" stands
      for fields of the config itself.
    metrics: a `Metric` each, in the order of tables. The first one picks the best checkpoint.
    likelihood: the predictive distribution for K-FAC: "categorical", "normal" (squared error) or
      another one that `optim.Curvature` takes.
  """

  options: ClassVar[Mapping[str, Group]]
  metrics: Sequence[Metric]
  likelihood: str

  def __init__(self, config: ml_collections.ConfigDict): ...

  def datasets(self) -> Mapping[str, Dataset]:
    """Returns the splits: "train", "test", maybe "validation" and further test sets; called once."""

  def init(self, key: jax.Array) -> Variables:
    """Returns fresh variables; parameters are float32, or float64 of such a run (traceable)."""

  def prepare(self, key: jax.Array, examples: Any, *, train: bool) -> Batch:
    """Makes a batch of stacked examples: augments, masks, normalises (traceable)."""

  def loss(self, variables: Variables, batch: Batch, key: jax.Array) -> tuple[WeightedSum, Aux]:
    """Returns the loss of a training batch as a weighted sum, and metrics (traceable).

    The mean over all weights, which must not depend on parameters, is minimised, however a batch is
    split over devices and accumulation steps.
    """

  def predict(self, variables: Variables, batch: Batch) -> Prediction:
    """Returns outputs without dropout, with their targets (traceable), for K-FAC."""

  def evaluate(self, variables: Variables, batch: Batch, mask: jax.Array) -> Mapping[str, Sums]:
    """Returns sums of metrics of a test batch by name (traceable).

    `mask` [batch] is False for padding.
    """


class BaseTask:
  """The optional parts of the contract, with their defaults."""

  options: ClassVar[Mapping[str, Group]] = {}
  repeats = 1  # how often in a row a training example comes, see `order.train_indices`
  class_names: Sequence[
    str
  ] = ()  # the classes of the labels; a finished run has them in its record

  @classmethod
  def check(cls, config: ml_collections.ConfigDict) -> None:
    """Raises a UserError for fields that contradict each other. Called before data are read."""

  @classmethod
  def complete(cls, config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    """Returns the config of a fresh run, completed from its files. Later starts take it as it is."""
    return config

  @classmethod
  def files(cls, config: ml_collections.ConfigDict) -> Mapping[str, str]:
    """Paths of files of which a run keeps and reads copies, by the field that names them."""
    return {}

  def sampled_labels(self) -> np.ndarray | None:
    """Labels [n] of the training examples, if each class is to come equally often; or None."""

  def initial(self, shapes: Variables, read_run: ReadRun) -> Variables | None:
    """Variables of these shapes, on the host, to start from; None stands for those of `init`."""

  def backbone(self, variables: Variables) -> Any:
    """The parameters of the model of images, from which other tasks start. It needs no data.

    Statistics of batch normalisation stand beside them, see `pretrained.beside`.
    """
    return variables["params"]

  def host_metrics(self, variables: Variables, split: Dataset) -> Mapping[str, float]:
    """Metrics of a test set that are not sums over examples, such as BLEU."""
    return {}

  def complaint(self, variables: Variables) -> str:
    """Why a run has to stop, after a checkpoint; "" if it goes on. Asked at evaluations and saves."""
    return ""

  def notes(self) -> Mapping[str, Any]:
    """Facts about data and metrics for the record of a run, as JSON takes them."""
    return {}

  def recall(self, notes: Mapping[str, Any]) -> None:
    """Restores the `notes` of a finished run, so that its answers need no data. Called first."""

  def curvature_view(self) -> Callable[[Variables, Batch], Prediction]:
    """The function of variables and a training batch whose curvature K-FAC takes."""
    return self.predict

  def layer_kind(self, path: str) -> str:
    """The kind of layer of a parameter, such as "MixerBlock_0/token_mixing/Dense_0/kernel"."""
    return path.partition("/")[0]

  def decayed(self, path: str) -> bool:
    """Whether weight decay of "kernels" acts on the parameter with this path."""
    return path.rpartition("/")[2] == "kernel"

  def representations(self, variables: Variables, batch: Batch) -> Mapping[str, jax.Array]:
    """Arrays [batch, ...] by name, such as codes, that the command `predict` writes (traceable).

    They join the parts of a `Prediction`, and replace a part of the same name.
    """
    return {}

  def texts(self, variables: Variables, split: Dataset) -> Mapping[str, Sequence[str]]:
    """The lines that `predict` writes for a split: answers first, then references."""
    raise UserError(f"{type(self).__name__} answers with no texts; take --out=FILE.npz")

  def pictures(self, variables: Variables, split: Dataset) -> Mapping[str, Any]:
    """Matplotlib figures of a trained model, by name."""
    return {}

  def answer(self, variables: Variables, inputs: Sequence[str]) -> Iterable[Mapping[str, Any]]:
    """A JSON object for each input, a path or a sentence; a UserError if one cannot be read."""
    raise UserError(f"{type(self).__name__} answers no inputs; leave them out to predict a split")

  def prepared_pictures(self, key: jax.Array) -> Mapping[str, Any]:
    """Matplotlib figures of training examples as `prepare` makes them, by name."""
    return {}

  def export(self, variables: Variables, path: pathlib.Path) -> None:
    """Writes the parameters for other programs: an .npz file with an array for each path."""
    named = jax.tree_util.tree_leaves_with_path(variables["params"])
    name = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
    containers.write(path, {name(key_path): np.asarray(x) for key_path, x in named}, {})


TASKS = {
  "image_classification": "mixer_jax.tasks.image_classification.task:ImageClassification",
  "distillation": "mixer_jax.tasks.distillation.task:Distillation",
  "self_distillation": "mixer_jax.tasks.self_distillation.task:SelfDistillation",
  "segmentation": "mixer_jax.tasks.segmentation.task:Segmentation",
  "autoencoding": "mixer_jax.tasks.autoencoding.task:Autoencoding",
  "masked_lm": "mixer_jax.tasks.masked_lm.task:MaskedLm",
  "text_classification": "mixer_jax.tasks.text_classification.task:TextClassification",
  "translation": "mixer_jax.tasks.translation.task:Translation",
  "operator_learning": "mixer_jax.tasks.operator_learning.task:OperatorLearning",
  "physics": "mixer_jax.tasks.physics.task:Physics",
}
"""Tasks by the name in `config.task`, "module:Class" each. A task is imported when it is needed."""


def seed_keys(seed: int) -> tuple[jax.Array, jax.Array]:
  """The keys of a run's fresh variables and of its steps."""
  first, steps = jax.random.split(draws.key(seed))
  return first, steps


def first_variables(init: Callable[[jax.Array], Variables], seed: int) -> Variables:
  """The fresh variables of a run with this seed, on the host."""
  return jax.device_get(jax.jit(init)(seed_keys(seed)[0]))


def in_batches(function: Callable[[Any], Any], examples: Any, batch_size: int) -> Any:
  """The arrays [n, ...] that `function` gives for examples [n, ...], in batches of one size."""
  number = len(jax.tree.leaves(examples)[0])
  ids, _ = order.test_indices(number, min(batch_size, number))
  found = [jax.device_get(function(jax.tree.map(lambda x: x[row], examples))) for row in ids]
  return jax.tree.map(lambda *x: np.concatenate(x)[:number], *found)


def compiled(method: Callable[..., Any]) -> functools.cached_property:
  """Decorates a method of variables and arrays, which becomes a program compiled once a task."""
  return functools.cached_property(lambda self: jax.jit(functools.partial(method, self)))


def answered(
  inputs: Sequence[str],
  size: int,
  read: Callable[[str], Any],
  answers: Callable[[list[Any]], Iterable[Any]],
) -> Iterator[tuple[str, Any]]:
  """Pairs of an input and its answer, with `size` inputs at once.

  `read` is called for each input, `answers` for the list of what was read. If `read` raises a
  UserError, it is raised after the answers to the inputs before.
  """
  for begin in range(0, len(inputs), size):
    part = inputs[begin : begin + size]
    found, refused = until_error(map(read, part))
    if found:
      yield from zip(part, answers(found))
    if refused:
      raise refused


def likeliest(row: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
  """The most probable class of probabilities [classes], and the first five with theirs."""
  top = {names[i]: float(row[i]) for i in np.argsort(-row, kind="stable")[:5]}
  name = next(iter(top))
  return {"class": name, "probability": top[name], "top": top}


def find(name: str) -> type[Task]:
  """Returns the class of a task.

  Args:
    name: a key of `TASKS`, or "module.path:Class".

  Returns:
    The class.

  Raises:
    UserError: there is no such task, it cannot be imported, or it lacks `options` or `metrics`.

  Example:
    ```python
    from mixer_jax import tasks

    print([metric.label for metric in tasks.find("masked_lm").metrics])
    ```
  """
  module, _, class_name = TASKS.get(name, name).partition(":")
  if not class_name:
    raise UserError(f"task is {shown(name)}; allowed: {', '.join(TASKS)} or module.path:Class")
  what = f"task is {shown(name)}, which cannot be imported (is it on PYTHONPATH?)"
  with as_user_error(what, ImportError, AttributeError, ValueError, TypeError):
    found = getattr(importlib.import_module(module), class_name)
  if not isinstance(getattr(found, "options", None), Mapping):
    raise UserError(f"task is {shown(name)}, which is no task; see tasks.Task")
  listed = getattr(found, "metrics", None)
  if not (listed and isinstance(listed, tuple | list)):  # reports read them without building a task
    allowed = "an attribute of the class, a list of tasks.Metric"
    raise UserError(f"metrics of task {shown(name)} is {listed!r}; allowed: {allowed}")
  return found
