"""TensorFlow Datasets without TensorFlow, and without a network where the files are here."""

import contextlib
import difflib
import importlib
import logging
import os
import pathlib
import pkgutil
import re
import threading
from typing import Any, Callable, Iterator, Mapping, Sequence
import urllib.parse

import numpy as np

from mixer_jax.data import cache, tfrecord
from mixer_jax.errors import UserError, as_user_error, reason
from mixer_jax.paths import user_path
from mixer_jax.runtime.imports import without

_PROBE_SECONDS = 10  # for all hosts together
_NO_SETS = ("core", "proto", "scripts", "testing")


def find(
  name: str, data_dir: str, check: Callable[[Any], None], others: Sequence[str] = ()
) -> tuple[pathlib.Path, Any]:
  """Finds a prepared set, as array_record or TFRecord, or downloads and prepares it.

  Returns its directory and the result of `check`. A UserError if there is no such set, or it is not
  here and cannot be downloaded.

  Args:
    name: as "dataset/config:1.0.0". TFDS chooses config and version where they are left out.
    data_dir: where prepared sets are; "" for TFDS's default.
    check: takes its `tfds.features.FeaturesDict`; raises a UserError if something is missing.
    others: further values of data.name, for messages; the first needs no files.
  """
  if name.endswith(".npz") or name.startswith(("/", ".", "~")):
    kinds = ", ".join([*others, "TFDS names"])
    raise UserError(f"data.name={name} is a path; allowed are {kinds}, with a path as data.dir")
  root = data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
  root = user_path(root).absolute()
  with _tfds(name, root / _dataset(name)) as tfds:
    try:
      builder = tfds.core.read_only_builder.builder_from_files(name, data_dir=str(root))
    except tfds.core.DatasetNotFoundError:
      builder = _prepare(tfds, name, root, check, others)
    return pathlib.Path(builder.data_dir), check(builder.info.features)


def check_image(where: str, image: Any) -> None:
  """Raises a UserError for a feature of images of floats, whose files hold the bytes of floats."""
  if np.issubdtype(getattr(image, "np_dtype", np.uint8), np.floating):
    raise UserError(f"{where}: feature image holds {image.np_dtype}; allowed: uint8 or uint16")


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


def _prepare(tfds: Any, name: str, root: pathlib.Path, check: Callable, others: Sequence[str]):
  _import_groups(tfds)
  known, dataset = tfds.list_builders(with_community_datasets=False), _dataset(name)
  if dataset not in known:
    close = ", ".join(difflib.get_close_matches(dataset, known)) or known[0]
    raise UserError(
      f"data.name={name}: no such dataset in TFDS or in {root}; allowed are"
      f" {', '.join([*others, 'TFDS names'])} such as {close}"
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
  instead = f" ; without any files: --config.data.name={others[0]}" if others else ""
  raise UserError(
    f"data.name={name}: not found in {root / dataset} and cannot be downloaded ({problem});"
    f" prepare it where there is a network and set data.dir: {command}{instead}"
  )


def _import_groups(tfds: Any) -> None:
  """Imports each group of sets apart: TFDS stops at the first one that lacks a package, as h5py."""
  for found in pkgutil.iter_modules(tfds.__path__):
    if found.ispkg and found.name not in _NO_SETS:
      with contextlib.suppress(ImportError):
        importlib.import_module(f"{tfds.__name__}.{found.name}")


def _unreachable(urls: list[str]) -> str:
  """Why a host of some URLs does not answer; "" if all do.

  TFDS itself retries for minutes before it gives up. The thread is a daemon because a look-up of
  names can hang longer than any time-out of ours.
  """
  import requests

  hosts = {urllib.parse.urlsplit(url).netloc: url for url in urls}
  problem = f"{', '.join(hosts)} did not answer within {_PROBE_SECONDS} s"

  def probe():
    nonlocal problem
    for host, url in hosts.items():
      try:
        status = requests.head(url, timeout=_PROBE_SECONDS / 2).status_code
        if status < 500:
          continue
        problem = f"{host} answers with status {status}"
      except Exception as error:  # urllib3 lets some through; a thread has nobody to tell
        problem = f"{host} cannot be reached: {type(error).__name__}"
      return
    problem = ""

  thread = threading.Thread(target=probe, daemon=True)
  thread.start()
  thread.join(_PROBE_SECONDS)
  return problem
