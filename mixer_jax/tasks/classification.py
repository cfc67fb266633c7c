"""Image classification with a softmax cross-entropy loss."""

import dataclasses
from typing import Any

from clu import metrics
import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax

from mixer_jax.data import augment

Batch = dict[str, jax.Array]


@flax.struct.dataclass
class TrainMetrics(metrics.Collection):
  """Averages over the examples trained on."""

  loss: metrics.Average.from_output("loss")
  accuracy: metrics.Average.from_output("top1")


@flax.struct.dataclass
class TestMetrics(metrics.Collection):
  """Averages over exactly the examples of a split; padding is masked."""

  loss: metrics.Average.from_output("loss")
  top1: metrics.Average.from_output("top1")
  top5: metrics.Average.from_output("top5")


@dataclasses.dataclass(frozen=True)
class Classification:
  """Softmax classification of images.

  Attributes:
    model: a Linen module from images [batch, height, width, 3] to logits
      [batch, num_classes]; takes the keyword `train`.
    images: how uint8 images become the model's input.
  """

  model: nn.Module
  images: augment.ImageSpec

  likelihood = "categorical"
  train_metrics = TrainMetrics
  test_metrics = TestMetrics

  def init(self, rng: jax.Array) -> Any:
    """Fresh parameters, float32."""
    size = self.images.image_size
    return self.model.init(rng, jnp.zeros((1, size, size, 3)))["params"]

  def batch(self, rng: jax.Array, images: jax.Array, labels: jax.Array, *, train: bool) -> Batch:
    """Makes a batch of uint8 images [batch, h, w, 3] and int32 labels [batch]."""
    if train:
      return {"image": augment.train_images(rng, images, self.images), "label": labels}
    return {"image": augment.test_images(images, self.images), "label": labels}

  def loss(self, params: Any, batch: Batch, rng: jax.Array) -> tuple[jax.Array, metrics.Collection]:
    """Mean cross-entropy in nats and the metrics of a training batch."""
    logits = self.model.apply({"params": params}, batch["image"], train=True, rngs={"dropout": rng})
    losses, top1, _ = _scores(logits, batch["label"])
    return jnp.mean(losses), self.train_metrics.single_from_model_output(loss=losses, top1=top1)

  def predict(self, params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Logits and labels for K-FAC: the curvature is that without dropout."""
    return self.model.apply({"params": params}, batch["image"]), batch["label"]

  def evaluate(self, params: Any, batch: Batch, mask: jax.Array) -> metrics.Collection:
    """Metrics of a test batch; `mask` [batch] is False for padding."""
    logits = self.model.apply({"params": params}, batch["image"])
    losses, top1, top5 = _scores(logits, batch["label"])
    return self.test_metrics.single_from_model_output(loss=losses, top1=top1, top5=top5, mask=mask)


def _scores(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Loss, top-1 and top-5 hits per example, float32 [batch]."""
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
  own = jnp.take_along_axis(logits, labels[:, None], axis=1)
  # Rank by strictly greater logits, ties by the lower class first, as argmax.
  earlier = jnp.arange(logits.shape[1])[None, :] < labels[:, None]
  rank = jnp.sum((logits > own) | ((logits == own) & earlier), axis=1)
  finite = jnp.isfinite(own[:, 0])
  return losses, (rank < 1) & finite, (rank < 5) & finite
