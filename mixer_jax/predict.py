"""What a trained classifier says of images, one's own among them.

run, params, *_ = evaluate.restore("runs/mine")
images = predict.read_images(run, ["cat.jpg"])
predict.probabilities(run, params, images)  # [1, classes]
"""

import functools
import os
import pathlib
from typing import Any, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mixer_jax.data import batches, crops, decode
from mixer_jax.errors import UserError
from mixer_jax.experiment import Experiment


def probabilities(run: Experiment, params: Any, images: np.ndarray) -> np.ndarray:
  """The predicted distribution over `run.dataset.class_names`.

  Args:
    run: made or restored.
    params: the model's parameters.
    images: [n, height, width, 3] uint8, of the size of the run's own.

  Returns:
    [n, classes] float32; each row sums to 1.

  Raises:
    UserError: the images are of another size.
  """

  @jax.jit
  def predict(params, images):
    labels = jnp.zeros(len(images), jnp.int32)  # a batch has some; nothing depends on them
    batch = run.task.batch(None, images, labels, train=False)
    logits, _ = run.task.predict(params, batch)
    return jax.nn.softmax(logits)

  size = min(run.config.eval_batch_size, len(images))
  ids, _ = batches.test_indices(len(images), size)
  return np.concatenate([predict(params, images[row]) for row in ids])[: len(images)]


def read_images(run: Experiment, paths: Sequence[str | os.PathLike]) -> np.ndarray:
  """Reads image files as the run's own images were stored.

  Args:
    run: says which size that is.
    paths: files of any format that Pillow reads.

  Returns:
    [n, height, width, 3] uint8: the shorter side resized, the longer one cropped around the
    centre.

  Raises:
    UserError: a file is missing or broken, or the run's images are not square.
  """
  height, width = run.dataset.train.images.shape[1:3]
  if height != width:
    raise UserError(f"images of {run.dataset.name} are {width}x{height} pixels; only squares here")

  shorter = run.config.data.resize if run.config.data.get("crop") else height
  fit = functools.partial(crops.centre, shorter=shorter, side=height)

  def read(path):
    try:
      data = pathlib.Path(path).read_bytes()
    except OSError as e:
      raise UserError(f"{path}: cannot be read: {e.strerror}") from e
    return decode.decode_image(data, str(path), fit)

  return np.stack([read(path) for path in paths])
