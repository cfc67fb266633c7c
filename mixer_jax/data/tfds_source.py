"""TensorFlow Datasets without TensorFlow, and without a network where the files are here."""

import contextlib
import difflib
import importlib
import logging
import os
import pathlib
import pkgutil
import re
from typing import Any, Callable, Iterator, Mapping, Sequence
import urllib.parse

from mixer_jax.data import cache, tfrecord
from mixer_jax.errors import UserError, as_user_error, reason
from mixer_jax.paths import user_path
from mixer_jax.runtime.imports import without

_PROBE_SECONDS = 5  # for each host
_NO_SETS = ("core", "proto", "scripts", "testing")


def find(name: str, data_dir: str, check: Callable[[Any], Any]) -> tuple[pathlib.Path, Any]:
  """Finds a prepared set, as array_record or TFRecord, or downloads and prepares it.

  Args:
    name: as "dataset/config:1.0.0". TFDS chooses config and version where they are left out.
    data_dir: where prepared sets are; "" for TFDS's default.
    check: takes its `tfds.features.FeaturesDict`; raises a UserError if something is missing.

  Returns:
    The directory of the set, and the result of `check`.

  Raises:
    UserError: there is no such set, or it is not here and cannot be downloaded.
  """
  if name.endswith(".npz") or name.startswith(("/", ".", "~")):
    raise UserError(f"data.name={name} is a path; set data.dir to it, and data.name to its kind")
  root = data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
  root = user_path(root).absolute()
  with _tfds(name, root / _dataset(name)) as tfds:
    try:
      builder = tfds.core.read_only_builder.builder_from_files(name, data_dir=str(root))
    except tfds.core.DatasetNotFoundError:
      builder = _prepare(tfds, name, root, check)
    return pathlib.Path(builder.data_dir), check(builder.info.features)


def named_features(what: str, features: Any, kinds: Mapping[str, str]) -> dict[str, Any]:
  """The features of a set by name; a UserError if one that is needed is missing, or no such kind.

  Args:
    what: the set, for messages.
    features: a `tfds.features.FeaturesDict`; others have no names.
    kinds: classes of `tfds.features` of the needed features, by name.
  """
  with without("tensorflow"):
    import tensorflow_datasets as tfds

  found = dict(features) if isinstance(features, tfds.features.FeaturesDict) else {}
  for name, kind in kinds.items():
    if not isinstance(found.get(name), getattr(tfds.features, kind)):
      needed = ", ".join(f"{k}: {v}" for k, v in kinds.items())
      there = ", ".join(f"{k}: {type(v).__name__}" for k, v in found.items()) or "none"
      raise UserError(f"{what}: needs the features {needed}, but has {there}")
  return found


class Examples:
  """The examples of a base split, in the order in which it was prepared, in any process.

  Features that are named in `encoded` are read as the bytes that are stored. A UserError if there
  is no such split, or its files are damaged.
  """

  def __init__(self, name: str, directory: pathlib.Path, base: str, encoded: Sequence[str] = ()):
    self._name, self._dir, self._base, self._encoded = name, directory, base, encoded
    self._read = self._records = None
    self._open()

  def __getstate__(self):
    return self.__dict__ | {"_read": None}

  def __len__(self) -> int:
    return len(self._records)

  def read(self, i: int) -> Mapping[str, Any]:
    """The features of an example by name; a UserError names a record that cannot be read."""
    if self._read is None:
      self._open()
    with as_user_error(f"{self.where(i)}: cannot be read"):
      return self._read(i)

  def where(self, i: int) -> str:
    return f"{self._dir}, record {i} of {self._base!r}"

  def fingerprint(self) -> str:
    stats = [(path.name, path.stat()) for path in self._dir.iterdir()]
    files = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return cache.fingerprint(("tfds", str(self._dir), self._base), files)

  def _open(self) -> None:
    with _tfds(self._name, self._dir) as tfds:
      builder = tfds.builder_from_directory(str(self._dir))
      decoders = {name: tfds.decode.SkipDecoding() for name in self._encoded}
      if builder.info.file_format == tfds.core.FileFormat.TFRECORD:
        if self._records is None:  # an index of the files, which goes to workers
          split = builder.info.splits[self._base]
          self._records = tfrecord.TfRecords(split.filepaths, split.shard_lengths)
        parse, records = builder.info.features.deserialize_example_np, self._records
        self._read = lambda i: parse(records[i], decoders=decoders)
      else:
        source = builder.as_data_source(self._base, decoders=decoders)
        self._records, self._read = range(len(source)), source.__getitem__


@contextlib.contextmanager
def _tfds(name: str, place: pathlib.Path) -> Iterator[Any]:
  """TFDS, whose errors become a line that names a set and its place."""
  with without("tensorflow"):
    import tensorflow_datasets as tfds  # slow, so only when needed

    # Damaged files raise nearly anything.
    with as_user_error(f"data.name={name}: {place} cannot be read"):
      yield tfds


def _dataset(name: str) -> str:
  return re.split("[/:]", name)[0]


def _prepare(tfds: Any, name: str, root: pathlib.Path, check: Callable[[Any], Any]) -> Any:
  _import_groups(tfds)
  known, dataset = tfds.list_builders(with_community_datasets=False), _dataset(name)
  if dataset not in known:
    close = ", ".join(difflib.get_close_matches(dataset, known)) or known[0]
    raise UserError(
      f"data.name={name}: no such dataset in TFDS or in {root}; TFDS has names such as {close}"
    )
  try:
    builder = tfds.builder(name, data_dir=str(root), file_format="array_record")
    check(builder.info.features)  # refuse before a long download
    problem = _unreachable([url for url in builder.url_infos if url.startswith("http")])
    if not problem:
      logging.getLogger(__name__).info("Downloading and preparing %s in %s", name, root)
      builder.download_and_prepare()
      return builder
  except UserError:
    raise
  except Exception as error:
    problem = reason(error)
  made = f"tfds.builder('{name}', data_dir='{root}', file_format='array_record')"
  # Without its group's import a set is known there only where TFDS could import all groups.
  group = ".".join(tfds.builder_cls(dataset).__module__.split(".")[:2])
  command = (
    f'python -c "import {group}, tensorflow_datasets as tfds; {made}.download_and_prepare()"'
  )
  raise UserError(
    f"data.name={name}: not found in {root / dataset} and cannot be downloaded ({problem});"
    f" prepare it where there is a network and set data.dir: {command}"
  )


def _import_groups(tfds: Any) -> None:
  """Imports each group of sets apart: TFDS stops at the first one that lacks a package, as h5py."""
  for found in pkgutil.iter_modules(tfds.__path__):
    if found.ispkg and found.name not in _NO_SETS:
      with contextlib.suppress(ImportError):
        importlib.import_module(f"{tfds.__name__}.{found.name}")


def _unreachable(urls: list[str]) -> str:
  """Why a host of some URLs does not answer; "" if all do.

  TFDS itself retries for minutes before it gives up.
  """
  import requests

  for host, url in {urllib.parse.urlsplit(url).netloc: url for url in urls}.items():
    try:
      status = requests.head(url, timeout=_PROBE_SECONDS).status_code
    except Exception as error:  # urllib3 lets some through
      return f"{host} cannot be reached: {type(error).__name__}"
    if status >= 500:
      return f"{host} answers with status {status}"
  return ""
