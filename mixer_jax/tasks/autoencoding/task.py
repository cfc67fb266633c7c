"""Images are reproduced through a code; the loss is their negative log-likelihood."""

import dataclasses
import functools
from typing import Any, Iterable, Mapping, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax

from mixer_jax import options
from mixer_jax.data.dataset import Dataset
from mixer_jax.images import crops, folder
from mixer_jax.options import Size, as_size, one_of
from mixer_jax.tasks import panels
from mixer_jax.tasks.autoencoding import pixels
from mixer_jax.tasks.autoencoding.autoencoder import VARIANTS
from mixer_jax.tasks.autoencoding.pixels import PixelData
from mixer_jax.tasks.metrics import Metric, Sums, WeightedSum
from mixer_jax.tasks.task import Aux, BaseTask, Batch, Prediction, Variables, answered

_PICTURED = 12  # images that are drawn
_LOSSES = '"normal": sum of squares of an image; "bernoulli": cross-entropy of its pixels'


@dataclasses.dataclass(frozen=True)
class Reconstruction:
  """Fields of the config itself."""

  likelihood: one_of(_LOSSES, ("normal", "bernoulli")) = "normal"


class Autoencoding(BaseTask):
  """Reproduction of images; a batch is {"image": float32 [batch, pixels] in [0, 1]}.

  The loss is a sum over the pixels of an image and a mean over images, without one half. `error`
  is the sum of squared errors, given if the loss is another. `unexplained` divides it by the sum of
  squared distances from the mean of the training images.
  """

  options = {"": Reconstruction, "model": VARIANTS, "data": PixelData}
  metrics = (
    Metric("loss", higher_is_better=False),
    Metric("error", higher_is_better=False),
    Metric("unexplained", higher_is_better=False, percent=True),
  )

  def __init__(self, config: ml_collections.ConfigDict):
    self.likelihood = config.likelihood
    self._data, self._eval_batch_size = options.made(PixelData, config.data), config.eval_batch_size
    self.model: nn.Module = VARIANTS[config.model.name](**options.given(config.model))

  @classmethod
  def check(cls, config: ml_collections.ConfigDict) -> None:
    options.made(PixelData, config.data).source.check()

  def datasets(self) -> Mapping[str, Dataset]:
    return self._loaded.splits

  @functools.cached_property
  def _loaded(self) -> pixels.Loaded:
    return pixels.load(self._data)

  @functools.cached_property
  def _stored(self) -> Size:
    """The size of the set's images before they are resized."""
    return as_size(self._loaded.stored)

  def notes(self) -> Mapping[str, Any]:
    return {"stored": self._stored}

  def recall(self, notes: Mapping[str, Any]) -> None:
    if "stored" in notes:
      self._stored = notes["stored"]

  @functools.cached_property
  def _mean(self) -> np.ndarray:
    """The mean of the training images, [pixels]."""
    return self._loaded.splits["train"].arrays()["image"].mean(0)

  def init(self, key: jax.Array) -> Variables:
    return self.model.init(key, jnp.zeros((1, int(np.prod(self._data.shape)))))

  def prepare(self, key: jax.Array, examples: Any, *, train: bool) -> Batch:
    return examples

  def loss(self, variables: Variables, batch: Batch, key: jax.Array) -> tuple[WeightedSum, Aux]:
    loss = WeightedSum.of(self._losses(*self.predict(variables, batch)[:2]))
    return loss, Aux({"loss": loss})

  def predict(self, variables: Variables, batch: Batch) -> Prediction:
    """Means, or logits of a "bernoulli" likelihood, [batch, pixels]."""
    outputs, _ = self.model.apply(variables, batch["image"])
    return Prediction(outputs, batch["image"])

  def evaluate(self, variables: Variables, batch: Batch, mask: jax.Array) -> Mapping[str, Sums]:
    outputs, images, *_ = self.predict(variables, batch)
    squares = jnp.sum(jnp.square(self._means(outputs) - images), axis=1)
    spread = jnp.sum(jnp.square(images - self._mean), axis=1)
    error = WeightedSum.of(squares, mask)
    sums = {"loss": WeightedSum.of(self._losses(outputs, images), mask)}
    sums |= {"error": error} if self.likelihood == "bernoulli" else {}
    return sums | {"unexplained": WeightedSum(error.total, WeightedSum.of(spread, mask).total)}

  def _losses(self, outputs: jax.Array, images: jax.Array) -> jax.Array:
    """The negative log-likelihood of each image, [batch]; "normal" pixels have variance 1/2."""
    normal = self.likelihood == "normal"
    of = optax.squared_error if normal else optax.sigmoid_binary_cross_entropy
    return jnp.sum(of(outputs, images), axis=1)

  def _means(self, outputs: jax.Array) -> jax.Array:
    return outputs if self.likelihood == "normal" else jax.nn.sigmoid(outputs)

  def answer(self, variables: Variables, inputs: Sequence[str]) -> Iterable[Mapping[str, Any]]:
    """The code and the squared error of image files, fitted to the size of the set's images."""
    fit = functools.partial(crops.fitted, size=self._stored, fit=self._data.fit)
    read = functools.partial(folder.read_image, fit=fit)

    def answers(whole):
      images = pixels.rows(np.stack(whole), self._data)
      found = jax.device_get(self.representations(variables, {"image": images}))
      squares = np.square(found["reconstructions"].reshape(images.shape) - images).sum(1)
      return zip(squares, found["codes"])

    for path, (error, code) in answered(inputs, self._eval_batch_size, read, answers):
      yield {"path": path, "error": float(error), "code": code.tolist()}

  def pictures(self, variables: Variables, split: Dataset) -> Mapping[str, Any]:
    images = split.arrays()["image"][:_PICTURED]
    found = np.asarray(self.representations(variables, {"image": images})["reconstructions"])
    shown = [images.reshape(found.shape), np.clip(found, 0, 1)]
    shown = [x[..., 0] if x.shape[3] == 1 else x for x in shown]
    figure, axes = panels.of_images(shown, (0.9 * len(images), 2.3))
    for axis, error in zip(axes[1], np.square(found.reshape(images.shape) - images).sum(1)):
      axis.set_title(f"{error:.2f}", size=8)
    figure.suptitle("images above their reconstructions, with the squared error", fontsize=9)
    return {"reconstructions": figure}

  def representations(self, variables: Variables, batch: Batch) -> Mapping[str, jax.Array]:
    """Codes [batch, width] and reconstructions [batch, height, width, channels]."""
    outputs, codes = self.model.apply(variables, batch["image"])
    return {"codes": codes, "reconstructions": self._means(outputs).reshape(-1, *self._data.shape)}
