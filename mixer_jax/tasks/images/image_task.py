"""Parts that tasks of labelled images share: their sets, and answers to files of a user."""

import functools
import os
from typing import Any, Iterable, Mapping, Sequence

import ml_collections
import numpy as np

from mixer_jax import options
from mixer_jax.data.dataset import Dataset
from mixer_jax.errors import check_list, until_error
from mixer_jax.images import crops, folder, sources
from mixer_jax.images.image_data import ImageData
from mixer_jax.tasks import labels
from mixer_jax.tasks.task import BaseTask, Variables


class ImageTask(BaseTask):
  """A task on the images of `ImageData`; a subclass loads them and answers to some.

  Attributes:
    class_names: the classes of the labels, in their order.
  """

  _config: ml_collections.ConfigDict
  _data: ImageData

  @functools.cached_property
  def _loaded(self) -> sources.Loaded:
    raise NotImplementedError

  def _answers(self, variables: Variables, images: np.ndarray) -> Iterable[Mapping[str, Any]]:
    """The answer to each image of uint8 [n, height, width, 3], without its path."""
    raise NotImplementedError

  def datasets(self) -> Mapping[str, Dataset]:
    return self._loaded.splits

  @functools.cached_property
  def class_names(self) -> tuple[str, ...]:
    return self._loaded.class_names

  @functools.cached_property
  def _stored(self) -> tuple[int, int]:
    """Height and width of the training images as they are stored."""
    return self._loaded.splits["train"].spec["image"].shape[:2]

  @classmethod
  def complete(cls, config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    """The config with the statistics, and the mirroring, that `data.name` stands for."""
    config = config.copy_and_resolve_references()
    data = options.made(ImageData, config.data)
    config.data.update(mean=data.mean, std=data.std, flip=data.flip)
    return config

  @property
  def _labels(self) -> np.ndarray:
    return labels.of_examples(self._loaded.splits["train"])

  def sampled_labels(self) -> np.ndarray | None:
    return self._labels if self._data.sampling == "class" else None

  def notes(self) -> Mapping[str, Any]:
    return {"stored": self._stored}

  def recall(self, notes: Mapping[str, Any]) -> None:
    if "stored" in notes:
      self._stored = tuple(notes["stored"])

  def read_images(self, paths: Sequence[str | os.PathLike]) -> np.ndarray:
    """Reads image files as the run's own images are stored: uint8 [n, height, width, 3].

    A UserError if a file is missing or broken.
    """
    data = self._data
    fit = functools.partial(crops.fitted, size=self._stored, fit=data.fit)
    if data.crop:
      fit = functools.partial(crops.centre, shorter=data.resize, size=self._stored)
    return np.stack([folder.read_image(path, fit) for path in paths])

  def answer(self, variables: Variables, inputs: Sequence[str]) -> Iterable[Mapping[str, Any]]:
    """The answers to image files; those before a broken one come first."""
    check_list(inputs, "paths")
    size = self._config.eval_batch_size
    for begin in range(0, len(inputs), size):
      paths = inputs[begin : begin + size]
      images, refused = until_error(self.read_images([path])[0] for path in paths)
      for path, found in zip(paths, self._answers(variables, np.stack(images)) if images else ()):
        yield {"path": path} | dict(found)
      if refused:
        raise refused
