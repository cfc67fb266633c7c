"""Further test sets, of other sources than the training images: classes matched, several a label.

A label is the number of a training class, or a set of them (Beyer et al., 2020, "Are we done with
ImageNet?", https://arxiv.org/abs/2006.07159): a bool for each training class.
"""

import dataclasses
import json
import logging
import os
import re
from typing import Any, Sequence

import numpy as np

from mixer_jax.data import cache, tfds_source
from mixer_jax.errors import UserError, as_user_error, once
from mixer_jax.images import arrays_file, base_split, decode, folder
from mixer_jax.paths import user_path

TFDS = "tfds:"
_NUMBERED = re.compile(r"(^|/)ILSVRC2012_val_(\d{8})\.")  # places in lists of labels, from 1
_SET_FEATURE = "real_label"  # of TFDS's imagenet2012_real
_LOG = logging.getLogger(__name__)
Source = base_split.Base | decode.Records


def open_set(
  name: str, place: str, labels: str, known: Sequence[str], data_dir: str
) -> tuple[Source, bool]:
  """A test set with labels of the training classes `known`, and whether each is a set of them.

  Args:
    name: of the set, for messages.
    place: an `.npz`, for its test split; "tfds:NAME[@SPLIT]"; or a folder, of a folder for each
      class or, with `labels`, also of images alone.
    labels: a JSON file of sets of classes in the place of other labels, see `_Sets`; "": none.
    data_dir: of TFDS.

  Raises:
    UserError: nothing that can be read is there, or a class is not among those of the training.
  """
  where = f"test set {name} ({place})"
  sets = _Sets(labels, known) if labels else None
  if place.startswith(TFDS):
    return _of_tfds(where, place.removeprefix(TFDS), sets, known, data_dir)
  if place.endswith(".npz"):
    file = arrays_file.ArraysFile(place, "test")
    base = file.read("test")
    if sets:
      own = sets.of_all(where, len(base))
    else:
      own = _taken(where, base.labels, numbers(where, file.class_names, known))
    return base_split.Base(base.images, own), bool(sets)
  files = folder.test_files(place, flat=bool(sets))
  if sets:
    own = sets.of(where, range(len(files)), lambda i: os.fsdecode(files.names[i]))
  else:
    own = numbers(where, files.identity[-1], known)[files.labels]
  return Relabelled(files, own), bool(sets)


def numbers(where: str, names: Sequence[str], known: Sequence[str]) -> np.ndarray:
  """The number of the training class of each class of a test set, int32.

  Classes have the same names in both; or, if one has not, those of the test set, and they alone, are
  the numbers of the training classes, from 0, as the folders of ImageNet-V2. Then a line says so. A
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


def _taken(where: str, labels: np.ndarray, of: np.ndarray) -> np.ndarray:
  decode.check_labels(where, labels.min(), labels.max(), len(of))
  return of[labels]


class _Sets:
  """The sets of right classes in a JSON file; a class is a name or a number, from 0.

  The file has a list with an entry for ILSVRC2012_val_00000001 and on, or for each example of a set
  without files, as ReaL's real.json; or an object of entries by path in the folder, name of the file
  or number of the example. An entry is a list of classes, and an empty one leaves an image out.
  """

  def __init__(self, path: str, known: Sequence[str]):
    self._path, self._known = path, {name: i for i, name in enumerate(known)}
    with as_user_error(f"{path}: cannot be read", OSError, ValueError, RecursionError):
      self._entries = json.loads(user_path(path).read_text(), object_pairs_hook=once)
    if not isinstance(self._entries, list | dict):
      raise UserError(f"{path}: is no JSON list or object of lists of classes")

  def of(self, where: str, examples: Sequence[int], key: Any) -> np.ndarray:
    """The sets of some examples, bool [n, classes]; a UserError if all are empty."""
    keys = [key(i) for i in examples]
    self._check_names(keys)
    found = np.array([self.one(key, i) for key, i in zip(keys, examples)])
    if not found.any():
      raise UserError(f"{where}: no example has a class in {self._path}")
    return found

  def of_all(self, where: str, number: int) -> np.ndarray:
    """As `of`, of all examples of a set without files, by their numbers."""
    if isinstance(self._entries, list) and len(self._entries) != number:
      found = f"{self._path}: has {len(self._entries)} lists of classes"
      raise UserError(f"{found} for the {number} examples of {where}")
    return self.of(where, range(number), str)

  def _check_names(self, paths: Sequence[str]) -> None:
    """Raises a UserError if several images are found by one name of a file."""
    by_name = {}
    for path in paths if isinstance(self._entries, dict) else ():
      name = path.rpartition("/")[2]
      if path not in self._entries and (other := by_name.setdefault(name, path)) != path:
        why = f"{name!r} is the name of {other} and of {path}; allowed: their paths"
        raise UserError(f"{self._path}: {why}")

  def one(self, key: str, i: int) -> np.ndarray:
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
      found[self._number(name, key)] = True
    return found

  def _number(self, name: Any, key: str) -> int:
    if isinstance(name, str) and name in self._known:
      return self._known[name]
    if isinstance(name, int) and not isinstance(name, bool) and 0 <= name < len(self._known):
      return name
    allowed = f"names of the training classes, or numbers to {len(self._known) - 1}"
    raise UserError(f"{self._path}: {key} has the class {name!r}; allowed: {allowed}")


@dataclasses.dataclass(frozen=True)
class Relabelled:
  """Encoded images with other labels: int32 [n], or bool [n, classes]."""

  records: decode.Records
  labels: np.ndarray

  def __len__(self) -> int:
    return len(self.records)

  @property
  def paths(self) -> np.ndarray | None:
    return getattr(self.records, "paths", None)

  def read(self, i: int) -> tuple[bytes, Any]:
    return self.records.read(i)[0], self.labels[i]

  def where(self, i: int) -> str:
    return self.records.where(i)

  def fingerprint(self) -> str:
    own = (str(self.labels.dtype), self.labels.shape, self.labels.tobytes())
    return cache.fingerprint((self.records.fingerprint(), own), [])


def _of_tfds(
  where: str, place: str, sets: _Sets | None, known: Sequence[str], data_dir: str
) -> tuple[decode.Records, bool]:
  name, _, split = place.partition("@")

  def check(features: Any) -> tuple[str, np.ndarray]:
    named = dict(features.items()) if hasattr(features, "items") else {}
    feature = _SET_FEATURE if _SET_FEATURE in named else "label"
    label = getattr(named.get(feature), "feature", named.get(feature))
    if not getattr(label, "names", None) or "image" not in named:
      needed = f"needs the features image and label or {_SET_FEATURE}"
      raise UserError(f"{where}: {needed}, but has {', '.join(named) or 'none'}")
    if sets and "file_name" not in named:
      raise UserError(f"{where}: has no feature file_name, by which labels of a file are found")
    tfds_source.check_image(where, named["image"])
    several = label is not named[feature]  # a sequence of labels
    return feature, several, numbers(where, label.names, known)

  directory, (feature, several, of) = tfds_source.find(name, data_dir, check)
  own = (name, directory, split or "test", ("image",))
  records = _TfdsRecords(*own).labelled(feature, several, of, sets, len(known))
  return records, bool(sets) or several


class _TfdsRecords(tfds_source.Examples):
  """Encoded images whose labels are read with them."""

  def labelled(
    self, feature: str, several: bool, of: np.ndarray, sets: _Sets | None, classes: int
  ) -> "_TfdsRecords":
    self._feature, self._several, self._of = feature, several, of
    self._sets, self._classes = sets, classes
    return self

  def read(self, i: int) -> tuple[bytes, Any]:
    example = super().read(i)
    if self._sets:
      return example["image"], self._sets.one(os.fsdecode(example["file_name"]), i)
    if self._several:
      found = np.zeros(self._classes, bool)
      found[self._of[np.asarray(example[self._feature], int)]] = True
      return example["image"], found
    label = int(example["label"])
    return example["image"], _taken(self.where(i), np.array([label]), self._of)[0]

  def fingerprint(self) -> str:
    sets = json.dumps(self._sets._entries) if self._sets else ""
    return cache.fingerprint((super().fingerprint(), self._of.tobytes(), sets), [])
