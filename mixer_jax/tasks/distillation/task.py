"""Image classification by labels and by the answers of a teacher."""

import dataclasses
import functools
import json
from typing import Annotated, Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax

from mixer_jax import options
from mixer_jax.data.dataset import Dataset
from mixer_jax.errors import UserError
from mixer_jax.images import augment
from mixer_jax.images.image_data import ImageData
from mixer_jax.options import Option, one_of
from mixer_jax.tasks.distillation import teacher as teacher_lib
from mixer_jax.tasks.image_classification.task import ImageClassification
from mixer_jax.tasks.images import batches
from mixer_jax.tasks.metrics import Metric, WeightedSum
from mixer_jax.tasks.task import Aux, Batch, ReadRun, Variables, compiled, first_variables

KINDS = ("hard", "soft", "consistent")


@dataclasses.dataclass(frozen=True)
class Options:
  """The group `distillation`."""

  teacher: Annotated[str, Option("run of image classification, or public weights")] = ""
  teacher_model: Annotated[
    str, Option('model of a file of weights; "": the catalogue tells it')
  ] = ""
  described: Annotated[str | None, Option("description of the teacher: filled in")] = None
  kind: one_of("kind of the teacher's part in the loss, see `from_teacher`", KINDS) = "hard"
  weight: Annotated[float, Option("share of that part; of consistent it is 1", 0, 1)] = 0.5
  temperature: Annotated[float, Option("divisor of both logits, not of hard", 0)] = 1.0


class Distillation(ImageClassification):
  """Image classification by labels and by the answers of a frozen teacher.

  The loss is (1 - weight) times the cross-entropy of the labels, mixed and smoothed as elsewhere,
  plus weight times `from_teacher`. "hard" and "soft" are those of Touvron et al., "Training
  data-efficient image transformers & distillation through attention", 2021,
  https://arxiv.org/abs/2012.12877, Section 4. "consistent" is "function matching" of Beyer et al.,
  "Knowledge distillation: a good teacher is patient and consistent", 2022,
  https://arxiv.org/abs/2106.05237, without labels. In all kinds the teacher sees the very image that
  the student sees, after crops and Mixup, in its own normalisation and resized (bilinear) to its own
  size. No model has a token for distillation: one head takes both parts of the loss.

  The teacher with its batch statistics is the collection "teacher", which nothing changes.

  "agreement" is how often student and teacher have the same first class in training, where the loss
  is the whole one. On test sets the loss is that of the labels, and "teacher_top1" is the teacher's
  accuracy, which is computed once a process.

  K-FAC's Fisher matrix is that of the student's softmax at temperature 1, with labels drawn from it.
  All parts of the loss are cross-entropies of this softmax up to a constant, whose Gauss-Newton
  matrix does not depend on the target: at temperature 1 the matrix is exactly that of the loss. At
  another temperature the teacher's part has the matrix of the softmax at that temperature. With
  estimation="empirical" K-FAC takes the gradients of "label".
  """

  options = ImageClassification.options | {"distillation": Options}
  metrics = (
    *ImageClassification.metrics,
    Metric("agreement", higher_is_better=True, percent=True),
    Metric("teacher_top1", higher_is_better=True, percent=True),
  )

  def __init__(self, config: ml_collections.ConfigDict):
    super().__init__(config)
    kind, weight = config.distillation.kind, config.distillation.weight
    self._weight = 1.0 if kind == "consistent" else weight
    self._teacher_top1: dict[int, float] = {}

  @classmethod
  def check(cls, config: ml_collections.ConfigDict) -> None:
    super().check(config)
    if config.loss != "softmax":
      raise UserError(f"loss is {config.loss!r}; distillation takes softmax")

  @classmethod
  def complete(cls, config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    config = super().complete(config).copy_and_resolve_references()
    if not (path := (own := config.distillation).teacher):
      how = "set it to the directory of a run, or to public weights"
      raise UserError(f"distillation.teacher is ''; {how}: --config.distillation.teacher=RUN")
    found = teacher_lib.describe(path, own.teacher_model, options.made(ImageData, config.data))
    if found.loss != "softmax" and own.kind != "hard":
      why = f"{path} was trained by a {found.loss} loss, whose logits are no softmax's"
      raise UserError(f"distillation.kind is {own.kind!r}, but {why}; allowed: hard")
    own.described = json.dumps(found._asdict())
    return config

  @functools.cached_property
  def _teacher(self) -> teacher_lib.Teacher:
    return teacher_lib.Teacher(**json.loads(self._config.distillation.described))

  @functools.cached_property
  def teacher(self) -> nn.Module:
    """Maps images [batch, height, width, 3] of its own size to logits [batch, classes]."""
    return self._teacher.build(len(self.class_names))

  def init(self, key: jax.Array) -> Variables:
    images = jnp.zeros((1, *options.pair(self._teacher.image_size), 3))
    shapes = jax.eval_shape(self.teacher.init, key, images)
    return {**super().init(key), "teacher": teacher_lib.absent(dict(shapes))}

  def initial(self, shapes: Variables, read_run: ReadRun) -> Variables | None:
    path = self._config.distillation.teacher
    read = teacher_lib.read(path, shapes["teacher"], self.class_names, read_run)
    student = super().initial(shapes, read_run)
    if student is None:
      student = first_variables(super().init, self._config.seed)
    return {**student, "teacher": read}

  def taught(self, variables: Variables, images: jax.Array) -> jax.Array:
    """The teacher's logits [batch, classes] for the student's images, without a gradient."""
    logits = self.teacher.apply(variables["teacher"], self._teacher.seen(images, self._data))
    return jax.lax.stop_gradient(logits)

  def loss(self, variables: Variables, batch: Batch, key: jax.Array) -> tuple[WeightedSum, Aux]:
    own, taught = self._config.distillation, self.taught(variables, batch["image"])
    logits, changed = self._trained(variables, batch["image"], key)
    losses = self._weight * from_teacher(own.kind, logits, taught, own.temperature)
    if self._weight < 1:
      losses += (1 - self._weight) * self._losses(logits, batch)
    answer, finite = jnp.argmax(logits, axis=1), jnp.isfinite(losses)
    loss = WeightedSum.of(losses, batch.get("weight"))
    hits = {"top1": batch["label"], "agreement": jnp.argmax(taught, axis=1)}
    sums = {name: WeightedSum.of((answer == x) & finite) for name, x in hits.items()}
    return loss, Aux({"loss": loss, **sums}, changed)

  def host_metrics(self, variables: Variables, split: Dataset) -> Mapping[str, float]:
    """The teacher's accuracy on a test set, computed once."""
    if id(split) not in self._teacher_top1:
      size, found = self._config.eval_batch_size, []
      for batch in batches.each_batch(split, batches.spaced(split), size):
        found.append((self._teacher_classes(variables["teacher"], batch["image"]), batch["label"]))
      answers, labels = (np.concatenate(x)[: len(split)] for x in zip(*found))
      if labels.ndim == 1:
        hits = answers == labels
      else:  # sets of classes: an image without one does not count
        hits = labels[np.arange(len(labels)), answers][labels.any(axis=1)]
      self._teacher_top1[id(split)] = float(hits.mean())
    return {"teacher_top1": self._teacher_top1[id(split)]}

  @compiled
  def _teacher_classes(self, teacher: Variables, images: np.ndarray) -> jax.Array:
    """The teacher's classes for stored images."""
    images = augment.eval_input(images, self._augmentation)
    return jnp.argmax(self.taught({"teacher": teacher}, images), axis=1)


def from_teacher(kind: str, logits: jax.Array, taught: jax.Array, temperature: float) -> jax.Array:
  """The loss of each example by a teacher's logits, float32 [batch].

  "hard" is the cross-entropy of the teacher's first class. "soft" and "consistent" are
  temperature^2 times the Kullback-Leibler divergence of the student's distribution s from the
  teacher's t, sum t log(t / s), both with logits divided by the temperature (Hinton et al., 2015,
  https://arxiv.org/abs/1503.02531, with the factor that keeps the size of gradients). DeiT's code
  also divides by the number of classes; its paper does not, and swaps s and t.
  """
  if kind == "hard":
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.argmax(taught, axis=1))
  student, teacher = (jax.nn.log_softmax(x / temperature) for x in (logits, taught))
  return temperature**2 * jnp.sum(jnp.exp(teacher) * (teacher - student), axis=1)
