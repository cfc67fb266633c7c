"""Sets of images of TensorFlow Datasets, still encoded."""

from typing import Any, Callable, Mapping

import numpy as np

from mixer_jax.data import tfds_source
from mixer_jax.errors import UserError

# The features of an example, its number and its place in words -> its label.
Label = Callable[[Mapping[str, Any], int, str], Any]


class Source:
  """A set of TFDS with the features `image` and `label`, as `sources.Source`."""

  def __init__(self, name: str, data_dir: str):
    self._name = name
    check = lambda features: _class_names(f"data.name={name}", features)
    self._place, self.class_names = tfds_source.find(name, data_dir, check)

  def read(self, base: str) -> "TfdsRecords":
    return TfdsRecords(self._name, self._place, base, _own_label)


class TfdsRecords(tfds_source.Examples):
  """The encoded images of a split with labels that `label` reads, as `decode.Records`."""

  def __init__(self, name: str, directory: Any, base: str, label: Label):
    super().__init__(name, directory, base, encoded=("image",))
    self.label = label

  def read(self, i: int) -> tuple[bytes, Any]:
    example = super().read(i)
    return example["image"], self.label(example, i, self.where(i))


def _own_label(example: Mapping[str, Any], i: int, where: str) -> int:
  return int(example["label"])


def _class_names(what: str, features: Any) -> tuple[str, ...]:
  kinds = {"image": "Image", "label": "ClassLabel"}
  named = tfds_source.named_features(what, features, kinds)
  check_image(what, named["image"])
  if not named["label"].names:
    raise UserError(f"{what}: has no names of classes (label.labels.txt)")
  return tuple(named["label"].names)


def check_image(what: str, image: Any) -> None:
  """Raises a UserError for a feature of images of floats, whose files hold the bytes of floats."""
  if np.issubdtype(image.np_dtype, np.floating):
    raise UserError(f"{what}: feature image holds {image.np_dtype}; allowed: uint8 or uint16")
