"""Further test sets, of other sources than the training images: classes matched, several a label.

A label is the number of a training class, or a set of them (Beyer et al., 2020, "Are we done with
ImageNet?", https://arxiv.org/abs/2006.07159): a bool for each training class.
"""

import dataclasses
import json
import logging
import os
import re
from typing import Any, Mapping, Sequence

import numpy as np

from mixer_jax.data import cache, tfds_source
from mixer_jax.data.further import TFDS
from mixer_jax.errors import UserError, as_user_error
from mixer_jax.images import arrays_file, folder, tfds_images
from mixer_jax.images.decode import Decoded, Records
from mixer_jax.paths import user_path

_NUMBERED = re.compile(r"(^|/)ILSVRC2012_val_(\d{8})\.")  # places in lists of labels, from 1
_SET_FEATURE = "real_label"  # of TFDS's imagenet2012_real
_LOG = logging.getLogger(__name__)


def open_set(
  name: str, place: str, labels: str, known: Sequence[str], data_dir: str
) -> tuple[Decoded | Records, bool]:
  """A test set with labels of the training classes `known`, and whether each is a set of them.

  Args:
    name: of the set, for messages.
    place: an `.npz`, for its test split; "tfds:NAME[@SPLIT]"; or a folder, of a folder for each
      class or, with `labels`, also of images alone.
    labels: a JSON file of sets of classes in the place of other labels, see `LabelSets`; "": none.
    data_dir: of TFDS.

  Raises:
    UserError: nothing that can be read is there, or a class is not among those of the training.
  """
  where = f"test set {name} ({place})"
  sets = LabelSets(labels, known) if labels else None
  if place.startswith(TFDS):
    return _of_tfds(where, place.removeprefix(TFDS), sets, known, data_dir)
  if place.endswith(".npz"):
    file = arrays_file.ArraysFile(place, "test")
    base = file.read("test")
    if sets:
      own = sets.of_all(where, len(base))
    else:
      own = _renumbered(where, base.labels, class_numbers(where, file.class_names, known))
    return dataclasses.replace(base, labels=own), bool(sets)
  files = folder.test_files(place, flat=bool(sets))
  if sets:
    own = sets.of_paths(where, [os.fsdecode(name) for name in files.names])
  else:
    own = class_numbers(where, files.class_names, known)[files.labels]
  identity = (*files.identity, str(own.dtype), own.shape, own.tobytes())
  return dataclasses.replace(files, labels=own, identity=identity), bool(sets)


def class_numbers(where: str, names: Sequence[str], known: Sequence[str]) -> np.ndarray:
  """The number of the training class of each class of a test set, int32.

  Classes have the same names in both. Or else those of the test set, and they alone, are the
  numbers of the training classes, from 0, as the folders of ImageNet-V2; then a line says so. A
  UserError names a class that is neither.
  """
  places = {name: i for i, name in enumerate(known)}
  digits = lambda names: all(re.fullmatch(r"\d{1,9}", name) for name in names)
  if unknown := [name for name in names if name not in places]:
    if digits(names) and not digits(known) and all(int(name) < len(known) for name in names):
      _LOG.info("%s: its %d classes are taken by their numbers", where, len(names))
      return np.array([int(name) for name in names], np.int32)
    why = f"{len(unknown)} of its {len(names)} classes are not among the {len(known)} of the"
    how = f"they match by name, or all by number, below {len(known)}"
    raise UserError(f"{where}: {why} training data, e.g. {unknown[0]!r}; {how}")
  return np.array([places[name] for name in names], np.int32)


def _renumbered(where: str, labels: np.ndarray, numbers: np.ndarray) -> np.ndarray:
  if len(outside := labels[(labels < 0) | (labels >= len(numbers))]):
    raise UserError(f"{where}: has the label {outside[0]}; allowed: 0 to {len(numbers) - 1}")
  return numbers[labels]


class LabelSets:
  """The sets of right classes in a JSON file; a class is a name or a number, from 0.

  The file has a list with an entry for ILSVRC2012_val_00000001 and on, or for each example of a set
  without files, as ReaL's real.json; or an object of entries by path in the folder, name of the file
  or number of the example. An entry is a list of classes, and an empty one leaves an image out.
  """

  def __init__(self, path: str, known: Sequence[str]):
    self._path, self._known = path, {name: i for i, name in enumerate(known)}
    with as_user_error(f"{path}: cannot be read", OSError, ValueError):
      self._text = user_path(path).read_text()
      self._entries = json.loads(self._text)
    if not isinstance(self._entries, list | dict):
      raise UserError(f"{path}: is no JSON list or object of lists of classes")

  @property
  def fingerprint(self) -> str:
    return self._text

  def of_paths(self, where: str, paths: Sequence[str]) -> np.ndarray:
    """The sets of files, bool [n, classes]; a UserError if all are empty, or one is in doubt."""
    by_name = {}
    for path in paths if isinstance(self._entries, dict) else ():
      name = path.rpartition("/")[2]
      if path not in self._entries and (other := by_name.setdefault(name, path)) != path:
        why = f"{name!r} is the name of {other} and of {path}; allowed: their paths"
        raise UserError(f"{self._path}: {why}")
    found = np.array([self.of_one(path, i) for i, path in enumerate(paths)])
    if not found.any():
      raise UserError(f"{where}: no example has a class in {self._path}")
    return found

  def of_all(self, where: str, number: int) -> np.ndarray:
    """As `of_paths`, of all examples of a set without files, by their numbers."""
    if isinstance(self._entries, list) and len(self._entries) != number:
      found = f"{self._path}: has {len(self._entries)} lists of classes"
      raise UserError(f"{found} for the {number} examples of {where}")
    return self.of_paths(where, list(map(str, range(number))))

  def of_one(self, key: str, i: int) -> np.ndarray:
    """The set of the example i of a key, which is its path if it has one; bool [classes]."""
    numbered = _NUMBERED.search(key)
    if isinstance(self._entries, dict):
      entry = self._entries.get(key, self._entries.get(key.rpartition("/")[2]))
    elif numbered or key == str(i):
      place = int(numbered[2]) - 1 if numbered else i
      entry = self._entries[place] if 0 <= place < len(self._entries) else None
    else:
      why = "a list of labels takes files named ILSVRC2012_val_NNNNNNNN; allowed: an object by path"
      raise UserError(f"{self._path}: {key}: {why}")
    if not isinstance(entry, list):
      raise UserError(f"{self._path}: has no list of classes for {key}")
    found = np.zeros(len(self._known), bool)
    for name in entry:
      number = self._known.get(name, name) if isinstance(name, str) else name
      if not isinstance(number, int) or not 0 <= number < len(found):
        allowed = f"names of the training classes, or numbers to {len(found) - 1}"
        raise UserError(f"{self._path}: {key} has the class {name!r}; allowed: {allowed}")
      found[number] = True
    return found


@dataclasses.dataclass(frozen=True)
class _TfdsLabel:
  """Reads the label of an example of a TFDS set: a class, or a set of them.

  Attributes:
    feature: that has the class, or with `several` a sequence of them.
    numbers: of the training classes, by those of the set.
    sets: of a file, in the place of the feature.
    classes: of the training.
  """

  feature: str
  several: bool
  numbers: np.ndarray
  sets: LabelSets | None
  classes: int

  def __call__(self, example: Mapping[str, Any], i: int, where: str) -> Any:
    if self.sets:
      return self.sets.of_one(os.fsdecode(example["file_name"]), i)
    labels = _renumbered(where, np.array(example[self.feature], int).ravel(), self.numbers)
    if not self.several:
      return labels[0]
    found = np.zeros(self.classes, bool)
    found[labels] = True
    return found


class _TfdsRecords(tfds_images.TfdsRecords):
  def fingerprint(self) -> str:
    label = self.label
    own = (label.numbers.tobytes(), label.sets.fingerprint if label.sets else "")
    return cache.fingerprint((super().fingerprint(), *own), [])


def _of_tfds(
  where: str, place: str, sets: LabelSets | None, known: Sequence[str], data_dir: str
) -> tuple[Records, bool]:
  name, _, split = place.partition("@")

  def check(features: Any) -> _TfdsLabel:
    named = dict(features.items()) if hasattr(features, "items") else {}
    feature = _SET_FEATURE if _SET_FEATURE in named else "label"
    label = getattr(named.get(feature), "feature", named.get(feature))
    if not getattr(label, "names", None) or "image" not in named:
      needed = f"needs the features image and label or {_SET_FEATURE}"
      raise UserError(f"{where}: {needed}, but has {', '.join(named) or 'none'}")
    if sets and "file_name" not in named:
      raise UserError(f"{where}: has no feature file_name, by which labels of a file are found")
    tfds_images.check_image(where, named["image"])
    several = label is not named[feature]  # a sequence of labels
    numbers = class_numbers(where, label.names, known)
    return _TfdsLabel(feature, several, numbers, sets, len(known))

  directory, label = tfds_source.find(name, data_dir, check)
  return _TfdsRecords(name, directory, split or "test", label), bool(sets) or label.several
