"""Image classification with a softmax or a binary cross-entropy."""

import dataclasses
import functools
import pathlib
from typing import Annotated, Any, Callable, Iterable, Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax

from mixer_jax import models, options, pretrained
from mixer_jax.data import dataset
from mixer_jax.data.dataset import Dataset
from mixer_jax.errors import UserError, as_user_error
from mixer_jax.images import augment, mixing, sources
from mixer_jax.images.image_data import ImageData
from mixer_jax.images.policy import Augment
from mixer_jax.options import Option, one_of
from mixer_jax.tasks import labels as labels_lib
from mixer_jax.tasks import panels
from mixer_jax.tasks.image_classification import pictures
from mixer_jax.tasks.images import start
from mixer_jax.tasks.images.image_task import ImageTask
from mixer_jax.tasks.metrics import ClassMeans, Metric, Sums, WeightedSum
from mixer_jax.tasks.task import Aux, Batch, Prediction, ReadRun, Variables, in_batches, likeliest

LOSSES = ("softmax", "binary")
_COLLECTIONS = ("params", "batch_stats")  # of the model
_PICTURED = 10_000  # examples of a split that pictures are made of
_AUGMENTED, _DRAWS = 8, 9  # examples of a picture of augmentation, and draws of each


@dataclasses.dataclass(frozen=True)
class Fields(start.Start):
  """Fields of the config itself."""

  loss: one_of("cross-entropy of one softmax, or a binary one of each class", LOSSES) = "softmax"
  label_smoothing: Annotated[float, Option("share of a label that all classes get", 0, 1)] = 0.0
  class_weight: labels_lib.ClassWeight = ""


class ImageClassification(ImageTask):
  """Classification of images; a batch is {"image": float32, "label": int32 [batch]}.

  A training batch with smoothed or mixed labels has "target", too, float32 [batch, classes]; then
  "label" is the class with the larger share, which the training accuracy counts.

  The loss is the cross-entropy of a softmax, or with loss="binary" the sum over the classes of
  binary cross-entropies (Wightman et al., 2021, https://arxiv.org/abs/2110.00476; timm takes the
  mean over the classes), and so is the metric of test sets, whose labels are not smoothed.

  With `class_weight` w the training loss is the sum of w_c t_c (-log p_c) over examples and classes,
  divided by that of w_c t_c, for the target t: of hard labels as PyTorch's CrossEntropyLoss(weight=w).
  So an example has the "weight" of its classes in the batch, float32 [batch], and K-FAC's Fisher
  matrix the same. With loss="binary" this weight multiplies the sum over the classes. Metrics of test
  sets are not weighted; `balanced_accuracy` is the mean over classes of `top1` of each.

  A model with batch normalisation has the averages of its statistics in the collection
  "batch_stats", which the loss renews; with `accum_steps` each part of a batch is normalised, and
  renews them, on its own. Tests, and K-FAC's Fisher matrix, normalise by the averages.

  K-FAC's Fisher matrix is that of the likelihood, "categorical" or "bernoulli", at the augmented
  images. With estimation="sampled" or "exact" it needs no labels, so that mixed ones change
  nothing. With "empirical" it takes the gradients of "label" for a softmax, one hard class where the
  loss has two, and those of "target" for binary losses.
  """

  options = {"": Fields, "model": models.VARIANTS, "data": ImageData, "augment": Augment}
  metrics = (
    Metric("top1", higher_is_better=True, percent=True),
    Metric("loss", higher_is_better=False, unit="nats"),
    Metric("top5", higher_is_better=True, percent=True),
  )

  def __init__(self, config: ml_collections.ConfigDict):
    self._config = config
    self._data = self._augmentation = options.made(ImageData, config.data)
    if self._data.crop:  # the workers hand over images of the right size
      self._augmentation = dataclasses.replace(self._data, resize=0, pad=0)
    self._policy, self.repeats = options.made(Augment, config.augment), self._data.repeats
    self._binary = config.loss == "binary"
    self.likelihood = "bernoulli" if self._binary else "categorical"

  @classmethod
  def check(cls, config: ml_collections.ConfigDict) -> None:
    (data := options.made(ImageData, config.data)).check()
    options.made(Augment, config.augment).check(
      pad=data.pad, resize=data.resize, random_crop=data.random_crop, crop=data.crop
    )
    start.check(config)
    labels_lib.check_weight(config.class_weight)

  @classmethod
  def complete(cls, config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    return super().complete(start.complete(config))

  @functools.cached_property
  def _loaded(self) -> sources.Loaded:
    # A mistake in the model ends the start before data are read or downloaded.
    jax.eval_shape(functools.partial(self._fresh, self._build(1)), jax.random.key(0))
    loaded = sources.load(self._data)
    augment.check_stored(self._augmentation, loaded.splits["train"].spec["image"].shape)
    return loaded

  @functools.cached_property
  def model(self) -> nn.Module:
    """The model; it maps images [batch, height, width, 3] to logits [batch, classes]."""
    return self._build(len(self.class_names))

  def _build(self, num_classes: int) -> nn.Module:
    group = self._config.model
    return models.VARIANTS[group.name](num_classes=num_classes, **options.given(group))

  def _fresh(self, model: nn.Module, key: jax.Array) -> Variables:
    size = options.pair(self._augmentation.image_size)
    with as_user_error(f"model {self._config.model.name}", ValueError):
      return dict(model.init(key, jnp.zeros((1, *size, 3))))

  def init(self, key: jax.Array) -> Variables:
    return self._fresh(self.model, key)

  def initial(self, shapes: Variables, read_run: ReadRun) -> Variables | None:
    if not self._config.pretrained:
      return None
    return start.variables(self._config, shapes, read_run, self.class_names)

  def backbone(self, variables: Variables) -> Any:
    return pretrained.beside(variables)

  def prepare(self, key: jax.Array, examples: Any, *, train: bool) -> Batch:
    images, labels, how = examples["image"], examples["label"], self._augmentation
    if not train:
      return {"image": augment.eval_input(images, how), "label": labels}
    images, shares = augment.train_input(key, images, how, self._policy), None
    if self._policy.mixes:
      mix_key = jax.random.fold_in(key, augment.KEYS)  # fold_in(key, i) is split(key)[i]
      images, shares = mixing.mix(mix_key, images, self._policy)
    batch, smoothing = {"image": images, "label": labels}, self._config.label_smoothing
    weights = self._class_weights
    if shares is None and not smoothing:
      return batch if weights is None else batch | {"weight": jnp.asarray(weights)[labels]}
    batch["target"] = mixing.soft_labels(labels, shares, len(self.class_names), smoothing)
    if weights is not None:
      batch["weight"] = batch["target"] @ weights
      if not self._binary:  # weight times this cross-entropy weighs each class
        batch["target"] *= weights / batch["weight"][:, None]
    if shares is not None:
      batch["label"] = jnp.where(shares >= 0.5, labels, labels[::-1])
    return batch

  @functools.cached_property
  def _class_weights(self) -> np.ndarray | None:
    given, labels = self._config.class_weight, lambda: self._labels
    return labels_lib.weights_of_labels(given, self.class_names, labels)

  def loss(self, variables: Variables, batch: Batch, key: jax.Array) -> tuple[WeightedSum, Aux]:
    logits, changed = self._trained(variables, batch["image"], key)
    loss = WeightedSum.of(self._losses(logits, batch), batch.get("weight"))
    top1 = _hits(logits, batch["label"])[0]
    return loss, Aux({"loss": loss, "top1": WeightedSum.of(top1)}, changed)

  def _trained(
    self, variables: Variables, images: jax.Array, key: jax.Array
  ) -> tuple[jax.Array, Mapping[str, Any]]:
    """Logits of training images, and the collections that the model changes."""
    own, rngs = _own(variables), {"dropout": key}
    changed = [name for name in own if name != "params"]
    return self.model.apply(own, images, train=True, rngs=rngs, mutable=changed)

  def _losses(self, logits: jax.Array, batch: Batch) -> jax.Array:
    """The loss of each example, float32 [batch]."""
    labels, target = batch["label"], batch.get("target")
    if self._binary:
      target = jax.nn.one_hot(labels, logits.shape[1]) if target is None else target
      return jnp.sum(optax.sigmoid_binary_cross_entropy(logits, target), axis=1)
    if target is None:
      return optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return optax.softmax_cross_entropy(logits, target)

  def predict(self, variables: Variables, batch: Batch) -> Prediction:
    """Logits, and int labels."""
    return Prediction(self.model.apply(_own(variables), batch["image"]), batch.get("label"))

  def representations(self, variables: Variables, batch: Batch) -> Mapping[str, jax.Array]:
    """Returns "features", the pooled ones that the head sees, float32 [batch, hidden_dim]."""
    return {"features": self._build(0).apply(variables, batch["image"])}

  def evaluate(self, variables: Variables, batch: Batch, mask: jax.Array) -> Mapping[str, Sums]:
    """Sums of the metrics; of labels that are sets of classes, bool [batch, classes], of `top1` alone.

    A prediction is right if it is in the set; an example without a class does not count (Beyer et
    al., 2020, https://arxiv.org/abs/2006.07159). No loss is defined there.
    """
    outputs, labels, *_ = self.predict(variables, batch)
    if labels.ndim == 2:
      return {"top1": WeightedSum.of(_in_set(outputs, labels), mask & labels.any(axis=1))}
    # With five classes or fewer every answer is among the first five.
    names = ("loss", "top1", "top5")[: 3 if outputs.shape[1] > 5 else 2]
    scores = (self._losses(outputs, batch), *_hits(outputs, labels))
    found = {k: WeightedSum.of(v, mask) for k, v in zip(names, scores)}
    each = ClassMeans.of_labels(scores[1], labels, outputs.shape[1], mask)
    return found | {"balanced_accuracy": each}

  def curvature_view(self) -> Callable[[Variables, Batch], Prediction]:
    def predict(variables: Variables, batch: Batch) -> Prediction:
      logits, targets = self.model.apply(_own(variables), batch["image"]), batch["label"]
      if self._binary:
        targets = batch.get("target", jax.nn.one_hot(targets, logits.shape[1]))
      return Prediction(logits, targets, batch.get("weight"))

    return predict

  layer_kind = staticmethod(models.layer_kind)
  decayed = staticmethod(models.is_decayed)

  def probabilities(self, variables: Variables, images: np.ndarray) -> np.ndarray:
    """The probabilities of `class_names`, float32 [n, classes], for images as the run's own.

    Each row is a distribution, unless the loss is binary: then each class has its own.
    """
    found = functools.partial(self._probabilities, variables)
    return in_batches(found, images, self._config.eval_batch_size)

  @functools.cached_property
  def _probabilities(self) -> Callable[[Variables, np.ndarray], jax.Array]:
    def probabilities(variables, images):
      batch = {"image": augment.eval_input(images, self._augmentation)}
      logits = self.predict(variables, batch).outputs
      return jax.nn.sigmoid(logits) if self._binary else jax.nn.softmax(logits)

    return jax.jit(probabilities)

  def _answers(self, variables: Variables, images: np.ndarray) -> Iterable[Mapping[str, Any]]:
    rows = self.probabilities(variables, images)
    return (likeliest(row, self.class_names) for row in rows)

  def pictures(self, variables: Variables, split: Dataset) -> Mapping[str, Any]:
    examples = dataset.examples(split, range(min(_PICTURED, len(split))))
    images, labels = examples["image"], examples["label"]
    if labels.ndim > 1:
      raise UserError("pictures need one label an image; this split has sets of labels")
    found, names = self.probabilities(variables, images), self.class_names
    drawn = {"confusion": panels.confusion(pictures.confusion(labels, found), names)}
    if len(rows := pictures.worst(labels, found)):
      drawn["mistakes"] = pictures.draw_mistakes(images[rows], labels[rows], found[rows], names)
    return drawn

  def prepared_pictures(self, key: jax.Array) -> Mapping[str, Any]:
    split, names = self._loaded.splits["train"], self.class_names
    examples = dataset.examples(split, range(min(_AUGMENTED, len(split))))
    prepare = jax.jit(lambda key: self.prepare(key, examples, train=True))
    drawn = [prepare(k) for k in jax.random.split(key, _DRAWS)]
    shown = [np.asarray(b["image"]) * self._data.std + self._data.mean for b in drawn]
    return {
      "augmented": pictures.draw_augmented(
        examples["image"], np.stack(shown, 1), examples["label"], names
      )
    }

  def export(self, variables: Variables, path: pathlib.Path) -> None:
    """Writes the weights in Linen's names, with the model's epsilons, see `pretrained.save`."""
    weights = pretrained.beside(variables)
    statistics = pretrained.Normalization(self._data.mean, self._data.std)
    model = self._build(weights["head"]["bias"].size)
    pretrained.save(path, weights, model, statistics, self._data.image_size)


def _own(variables: Variables) -> Variables:
  """The variables of the model alone."""
  return {name: variables[name] for name in _COLLECTIONS if name in variables}


def _in_set(logits: jax.Array, sets: jax.Array) -> jax.Array:
  """Whether the likeliest class is in the set, bool [batch]."""
  best = jnp.argmax(logits, axis=1)[:, None]
  hit = jnp.take_along_axis(sets, best, axis=1)[:, 0]
  return hit & jnp.isfinite(jnp.take_along_axis(logits, best, axis=1))[:, 0]


def _hits(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Whether the label is the first, and among the first five, bool [batch]."""
  own = jnp.take_along_axis(logits, labels[:, None], axis=1)
  # Rank by strictly greater logits, ties by the lower class first, as argmax.
  earlier = jnp.arange(logits.shape[1])[None, :] < labels[:, None]
  rank = jnp.sum((logits > own) | ((logits == own) & earlier), axis=1)
  finite = jnp.isfinite(own[:, 0]) & ~jnp.isnan(logits).any(axis=1)
  return (rank < 1) & finite, (rank < 5) & finite
