"""Segmentation of images by an all-MLP backbone and UperNet, with a softmax for each pixel."""

import dataclasses
import functools
from typing import Any, Callable, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax

from mixer_jax import models, options
from mixer_jax.data.dataset import Dataset
from mixer_jax.errors import as_user_error
from mixer_jax.images import augment as images_lib
from mixer_jax.images import folder
from mixer_jax.models import upernet
from mixer_jax.tasks import labels as labels_lib
from mixer_jax.tasks.images import start
from mixer_jax.tasks.metrics import Confusion, Hits, MeanIou, Metric, Sums, WeightedSum
from mixer_jax.tasks.segmentation import augment, data, pairs, pictures, windows
from mixer_jax.tasks.segmentation.data import SegmentationData
from mixer_jax.tasks.task import (
  Aux,
  BaseTask,
  Batch,
  Prediction,
  ReadRun,
  Variables,
  compiled,
  first_variables,
  in_batches,
)

_PICTURED = 256  # images of a split whose confusion is drawn
_AUGMENTED, _DRAWS = 6, 7  # examples in the picture of augmentation, and draws of each
_LEAST = 1e-6  # weight of a batch of void pixels alone, so that its loss is 0, not NaN


@dataclasses.dataclass(frozen=True)
class Fields(start.Start):
  """Fields of the config itself."""

  class_weight: labels_lib.ClassWeight = ""


class Segmentation(BaseTask):
  """A class for each pixel; a batch is {"image": float32, "label": int32, "weight": float32}.

  Images are [batch, height, width, 3], normalised; labels are classes [batch, height, width], with
  the weight 0 where a pixel is void, else 1, or in training the `class_weight` of its class. The loss is the mean cross-entropy of the pixels with
  weight, in a batch and in a split, plus that of the decoder's second head times its weight. The
  model sees test images larger than `data.image_size` in windows of that size.

  `miou` is the mean over classes of intersection over union and `accuracy` the share of right
  answers, both from the counts of all pixels of a split that are not void.

  K-FAC takes the logits on the decoder's own grid, before they are interpolated to pixels, with the
  labels of the pixels at the grid's centres. The Fisher matrix of the pixels' own likelihood takes
  the interpolated logits, which are many more rows and nearly copies of each other. Both matrices
  are means over rows, and agree where neighbouring logits have equal gradients.
  """

  options = {
    "": Fields,
    "model": models.BACKBONES,
    "decoder": upernet.upernet,
    "data": SegmentationData,
  }
  metrics = (
    Metric("miou", higher_is_better=True, percent=True),
    Metric("accuracy", higher_is_better=True, percent=True),
    Metric("loss", higher_is_better=False, unit="nats"),
  )
  likelihood = "categorical"

  def __init__(self, config: ml_collections.ConfigDict):
    self._config, self._data = config, options.made(SegmentationData, config.data)

  @classmethod
  def check(cls, config: ml_collections.ConfigDict) -> None:
    options.made(SegmentationData, config.data).check()
    start.check(config)
    labels_lib.check_weight(config.class_weight)

  complete = staticmethod(start.complete)

  def datasets(self) -> Mapping[str, Dataset]:
    return self._loaded.splits

  @functools.cached_property
  def _loaded(self) -> data.Loaded:
    # A mistake in the model's fields is found before data are read.
    with as_user_error(f"model {self._config.model.name}", ValueError):
      jax.eval_shape(functools.partial(self._fresh, self._build(2)), jax.random.key(0))
    return data.load(self._data)

  @functools.cached_property
  def class_names(self) -> tuple[str, ...]:
    return self._loaded.class_names

  @functools.cached_property
  def model(self) -> upernet.UperNet:
    """Maps images [batch, *image_size, 3] to logits on a grid."""
    return self._build(len(self.class_names))

  def _build(self, num_classes: int) -> upernet.UperNet:
    group = self._config.model
    backbone = functools.partial(models.BACKBONES[group.name], **options.given(group))
    return upernet.upernet(backbone, num_classes, **options.given(self._config.decoder))

  def _fresh(self, model: upernet.UperNet, key: jax.Array) -> Variables:
    size = options.pair(self._data.image_size)
    return {"params": model.init(key, jnp.zeros((1, *size, 3)))["params"]}

  def init(self, key: jax.Array) -> Variables:
    return self._fresh(self.model, key)

  def initial(self, shapes: Variables, read_run: ReadRun) -> Variables | None:
    """A fresh decoder on the backbone of a run or of public weights."""
    if not self._config.pretrained:
      return None
    backbone = start.params(self._config, shapes["params"]["backbone"], read_run)
    fresh = first_variables(self.init, self._config.seed)
    return {"params": {**fresh["params"], "backbone": backbone}}

  def backbone(self, variables: Variables) -> Any:
    return variables["params"]["backbone"]

  def prepare(self, key: jax.Array, examples: Any, *, train: bool) -> Batch:
    images, masks, void = examples["image"], examples["mask"], self._data.void
    if train:
      images, masks = augment.train_input(key, images, masks, self._data)
    else:
      images = images_lib.normalise(images, self._data)
    ids = masks.astype(jnp.int32)
    labels = jnp.where(ids == void, 0, ids - (ids > void))
    weights = (ids != void).astype(jnp.float32)
    if train and self._class_weights is not None:
      weights *= jnp.asarray(self._class_weights)[labels]
    return {"image": images, "label": labels, "weight": weights}

  @functools.cached_property
  def _class_weights(self) -> np.ndarray | None:
    def counts() -> np.ndarray:
      """Pixels of each class in the training masks."""
      masks = self._loaded.splits["train"].arrays()["mask"]
      found = sum(np.bincount(mask.reshape(-1), minlength=256) for mask in masks)
      return np.delete(found, self._data.void)[: len(self.class_names)]

    return labels_lib.class_weights(self._config.class_weight, len(self.class_names), counts)

  def loss(self, variables: Variables, batch: Batch, key: jax.Array) -> tuple[WeightedSum, Aux]:
    apply = functools.partial(self.model.apply, variables, train=True, rngs={"dropout": key})
    logits, second = apply(batch["image"])
    logits = upernet.resized(logits, batch["label"].shape[1:])
    sums = self._sums(logits, batch, batch["weight"])
    loss = sums["loss"]
    if second is not None:
      other = _cross_entropy(upernet.resized(second, batch["label"].shape[1:]), batch)
      other = WeightedSum.of(other, batch["weight"]).total
      loss = loss.replace(total=loss.total + self.model.auxiliary * other)
    return loss.replace(weight=jnp.maximum(loss.weight, _LEAST)), Aux(sums)

  def _sums(self, logits: jax.Array, batch: Batch, weights: jax.Array) -> dict[str, Sums]:
    """Metrics of logits of pixels [batch, height, width, classes]."""
    labels, classes = jnp.asarray(batch["label"], jnp.int32), logits.shape[-1]
    # argmax takes a NaN for the largest logit: such a pixel has no answer.
    answers = jnp.where(jnp.isfinite(logits.max(-1)), jnp.argmax(logits, -1), classes)
    counts = Confusion.of(labels, answers, classes, weights)
    loss = WeightedSum.of(_cross_entropy(logits, batch), weights)
    parts = counts.high, counts.low
    return {"miou": MeanIou(*parts), "accuracy": Hits(*parts), "loss": loss}

  def logits(self, variables: Variables, images: jax.Array) -> jax.Array:
    """Logits of all pixels of normalised images, float32 [batch, height, width, classes]."""
    size, classes = options.pair(self._data.image_size), self.model.num_classes
    seen = lambda x: upernet.resized(self.model.apply(variables, x)[0], size)
    return windows.sliding(seen, images, classes, size, self._data.window_stride)

  def predict(self, variables: Variables, batch: Batch) -> Prediction:
    """Logits [batch, pixels, classes], in the order of rows, with labels and weights."""
    logits = self.logits(variables, batch["image"])
    return Prediction(_rows(logits), _rows(batch["label"]), _rows(batch["weight"]))

  def evaluate(self, variables: Variables, batch: Batch, mask: jax.Array) -> Mapping[str, Sums]:
    weights = batch["weight"] * mask[:, None, None]
    return self._sums(self.logits(variables, batch["image"]), batch, weights)

  def curvature_view(self) -> Callable[[Variables, Batch], Prediction]:
    def on_grid(variables: Variables, batch: Batch) -> Prediction:
      logits = self.model.apply(variables, batch["image"])[0]
      size = logits.shape[1:3]
      at = [np.int32((np.arange(n) + 0.5) * m / n) for n, m in zip(size, batch["label"].shape[1:])]
      chosen = lambda x: _rows(x[:, at[0][:, None], at[1]])
      return Prediction(_rows(logits), chosen(batch["label"]), chosen(batch["weight"]))

    return on_grid

  decayed = staticmethod(models.is_decayed)

  def layer_kind(self, path: str) -> str:
    return models.layer_kind(path) if path.startswith("backbone/") else "decoder"

  def representations(self, variables: Variables, batch: Batch) -> Mapping[str, jax.Array]:
    """Found and true classes and weights, uint8 [batch, height, width], in place of the rows."""
    found = jnp.argmax(self.logits(variables, batch["image"]), -1)
    classes = {"outputs": found, "targets": batch["label"], "weights": batch["weight"]}
    return {name: x.astype(jnp.uint8) for name, x in classes.items()}

  def classes(self, variables: Variables, images: np.ndarray) -> np.ndarray:
    """The most probable classes, uint8 [n, height, width], of images uint8 [n, height, width, 3]."""
    found = functools.partial(self._classes, variables)
    return in_batches(found, images, self._config.eval_batch_size)

  @compiled
  def _classes(self, variables: Variables, images: np.ndarray) -> jax.Array:
    logits = self.logits(variables, images_lib.normalise(images, self._data))
    return jnp.argmax(logits, -1).astype(jnp.uint8)

  def answer(self, variables: Variables, inputs: Sequence[str]) -> Iterable[Mapping[str, Any]]:
    """The share of each class in image files, the largest first. Each size is compiled once."""
    canvas = self._data.canvas
    for path in inputs:
      image = folder.read_image(path)
      height, width = pairs.fitting(image.shape, canvas) if canvas else image.shape[:2]
      whole = pairs.on_canvas(image, canvas, 0) if canvas else image
      found = self.classes(variables, whole[None])[0, :height, :width]
      shares = np.bincount(found.reshape(-1), minlength=len(self.class_names)) / found.size
      best = [i for i in np.argsort(-shares, kind="stable") if shares[i]]
      yield {"path": path, "shares": {self.class_names[i]: float(shares[i]) for i in best}}

  def pictures(self, variables: Variables, split: Dataset) -> Mapping[str, Any]:
    arrays = {name: x[:_PICTURED] for name, x in split.arrays().items()}
    found, names = self.classes(variables, arrays["image"]), self.class_names
    batch = jax.jit(lambda x: self.prepare(None, x, train=False))(
      {"image": arrays["image"][:, :1, :1], "mask": arrays["mask"]}
    )
    labels, weights = np.asarray(batch["label"]), np.asarray(batch["weight"])
    counts = np.asarray(Confusion.of(labels, found, len(names), weights).counts())[:, :-1]
    return {
      "masks": pictures.draw_masks(arrays["image"], labels, found, weights, names),
      "confusion": pictures.draw_confusion(counts, names),
    }

  def prepared_pictures(self, key: jax.Array) -> Mapping[str, Any]:
    examples = {k: x[:_AUGMENTED] for k, x in self._loaded.splits["train"].arrays().items()}
    prepare = jax.jit(lambda key: self.prepare(key, examples, train=True))
    batches = [jax.device_get(prepare(k)) for k in jax.random.split(key, _DRAWS)]
    for batch in batches:
      batch["image"] = batch["image"] * self._data.std + self._data.mean
    return {"augmented": pictures.draw_augmented(batches, self.class_names)}


def _cross_entropy(logits: jax.Array, batch: Batch) -> jax.Array:
  """The cross-entropy of each pixel, float32 [batch, height, width]."""
  return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


def _rows(x: jax.Array) -> jax.Array:
  """The pixels of images [batch, height, width, ...] as rows [batch, pixels, ...]."""
  return x.reshape(len(x), -1, *x.shape[3:])
