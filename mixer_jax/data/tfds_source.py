"""TensorFlow Datasets without TensorFlow, and without a network where the files are here."""

import difflib
import logging
import os
import pathlib
import re
import threading
import urllib.parse

from mixer_jax.data import cache, decode
from mixer_jax.errors import UserError, reason
from mixer_jax.no_tensorflow import without_tensorflow

_PROBE_SECONDS = 10  # for all hosts together


class Tfds:
  """An image-classification set of TFDS, prepared as array_record.

  Attributes:
    class_names: of its `label` feature.
  """

  def __init__(self, name: str, data_dir: str):
    """Finds the prepared set, or downloads and prepares it.

    Args:
      name: "cifar10", "cifar10:3.0.2", "dataset/config" or
        "dataset/config:1.0.0"; without a version the newest one is read.
      data_dir: where prepared sets are; "" for TFDS's default.

    Raises:
      UserError: if there is no such set, it holds no labelled images, or it is
        not here and cannot be downloaded.
    """
    self._name = name
    root = (
      pathlib.Path(data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets")
      .expanduser()
      .absolute()
    )
    with without_tensorflow():
      import tensorflow_datasets as tfds  # slow, so only when needed  # pylint: disable=g-import-not-at-top

      self._dir = _find_prepared(name, root) or _prepare(tfds, name, root)
      try:
        self._builder = tfds.builder_from_directory(str(self._dir))
      except Exception as error:
        raise UserError(f"data.name={name}: {self._dir} cannot be read: {reason(error)}") from error
      self.class_names = _class_names(tfds, name, self._builder.info.features)

  def records(self, base: str) -> decode.Records:
    """Opens a base split, in the order in which it was prepared."""
    available = list(self._builder.info.splits or ())
    if base not in available:
      raise UserError(
        f"data.name={self._name}: has no split {base!r}, only {', '.join(sorted(available))};"
        " set data.train_split and data.test_split"
      )
    examples = _Examples(self._name, self._dir, base)
    return decode.Records(examples.open(), examples.fingerprint, examples.read, examples.where)


class _Examples:
  """The examples of one split; a copy in another process opens the files there."""

  def __init__(self, name: str, directory: pathlib.Path, base: str):
    self._name, self._dir, self._base = name, directory, base
    self._source = None

  def __getstate__(self):
    return self.__dict__ | {"_source": None}

  def open(self) -> int:
    """Opens the files and returns the number of examples."""
    with without_tensorflow():
      import tensorflow_datasets as tfds  # pylint: disable=g-import-not-at-top

      try:
        builder = tfds.builder_from_directory(str(self._dir))
        decoders = {"image": tfds.decode.SkipDecoding()}
        self._source = builder.as_data_source(self._base, decoders=decoders)
        return len(self._source)
      except NotImplementedError as error:
        raise UserError(
          f"data.name={self._name}: {self._dir} is not in the array_record format, which is what can be read without"
          f" TensorFlow; prepare it into another data.dir: {_command(self._name, 'NEW_DIR')}"
        ) from error
      except Exception as error:
        raise UserError(
          f"data.name={self._name}: {self._dir} cannot be read: {reason(error)}"
        ) from error

  def read(self, i: int) -> tuple[bytes, int]:
    if self._source is None:
      self.open()
    try:
      example = self._source[i]
      return example["image"], int(example["label"])
    except Exception as error:
      raise UserError(f"{self.where(i)}: cannot be read: {reason(error)}") from error

  def where(self, i: int) -> str:
    return f"{self._dir}, record {i} of {self._base!r}"

  def fingerprint(self) -> str:
    stats = [(path.name, path.stat()) for path in self._dir.iterdir()]
    files = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return cache.fingerprint(("tfds", str(self._dir), self._base), files)


def _find_prepared(name: str, root: pathlib.Path) -> pathlib.Path | None:
  """Returns the newest ROOT/NAME[/CONFIG]/VERSION that fits, looking at files only."""
  path, _, version = name.partition(":")
  dataset, _, config = path.partition("/")
  if not re.fullmatch(r"\w+", dataset):
    return None
  found = []
  for info in (root / dataset).glob("**/dataset_info.json"):
    *its_config, its_version = info.parent.relative_to(root / dataset).parts or ("",)
    its_config = "/".join(its_config)
    fits = config in ("", its_config) and version in ("", its_version)
    if (
      fits
      and re.fullmatch(r"\d+\.\d+\.\d+", its_version)
      and (info.parent / "features.json").exists()
    ):
      found.append((its_config, [int(n) for n in its_version.split(".")], info.parent))
  configs = sorted({its_config for its_config, _, _ in found})
  if len(configs) > 1:
    raise UserError(
      f"data.name={name}: {root / dataset} holds several configs, name one of them: "
      + ", ".join(f"{dataset}/{c}" for c in configs)
    )
  return max(found)[2] if found else None


def _prepare(tfds, name: str, root: pathlib.Path) -> pathlib.Path:
  """Downloads and prepares a set; returns its directory."""
  dataset = re.split("[/:]", name)[0]
  known = tfds.list_builders(with_community_datasets=False)
  if dataset not in known:
    close = difflib.get_close_matches(dataset, known)
    raise UserError(
      f"data.name={name}: no such dataset in TFDS or in {root};"
      f" allowed are sample, folder, npz and TFDS names{' such as ' if close else ''}{', '.join(close)}"
    )
  try:
    builder = tfds.builder(name, data_dir=str(root), file_format="array_record")
    _class_names(tfds, name, builder.info.features)  # refuse before a long download
    problem = _unreachable([url for url in builder.url_infos if url.startswith("http")])
    if not problem:
      logging.getLogger(__name__).info("Downloading and preparing %s in %s", name, root)
      builder.download_and_prepare()
  except UserError:
    raise
  except Exception as error:
    problem = reason(error)
  if problem:
    raise UserError(
      f"data.name={name}: not found in {root / dataset} and cannot be downloaded ({problem}); prepare it where there"
      f" is a network and set data.dir: {_command(name, str(root))} ; or train on the bundled sample:"
      " --config.data.name=sample"
    )
  return pathlib.Path(builder.data_dir)


def _unreachable(urls: list[str]) -> str:
  """Returns why the hosts of some URLs do not answer, "" if all do.

  TFDS itself retries for minutes before it gives up. The threads are daemons
  because a look-up of names can hang longer than any time-out of ours.
  """
  import requests  # pylint: disable=g-import-not-at-top

  by_host = {urllib.parse.urlsplit(url).netloc: url for url in urls}
  problems = {host: f"{host} did not answer within {_PROBE_SECONDS} s" for host in by_host}

  def probe(host, url):
    try:
      status = requests.head(url, timeout=_PROBE_SECONDS / 2).status_code
      problems[host] = f"{host} answers with status {status}" if status >= 500 else ""
    except requests.RequestException as error:
      problems[host] = f"{host} cannot be reached: {type(error).__name__}"

  threads = [threading.Thread(target=probe, args=item, daemon=True) for item in by_host.items()]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(_PROBE_SECONDS / len(threads))
  return next((problem for problem in problems.values() if problem), "")


def _class_names(tfds, name: str, features) -> tuple[str, ...]:
  fits = (
    isinstance(features, tfds.features.FeaturesDict) and "image" in features and "label" in features
  )
  if (
    not fits
    or not isinstance(features["image"], tfds.features.Image)
    or not isinstance(features["label"], tfds.features.ClassLabel)
  ):
    listed = (
      ", ".join(f"{k}: {type(v).__name__}" for k, v in features.items()) if features else "none"
    )
    raise UserError(
      f"data.name={name}: needs the features image: Image and label: ClassLabel, but has {listed}"
    )
  if not features["label"].names:
    raise UserError(f"data.name={name}: has no names of classes (label.labels.txt)")
  return tuple(features["label"].names)


def _command(name: str, data_dir: str) -> str:
  return (
    'python -c "import tensorflow_datasets as tfds; '
    f"tfds.builder('{name}', data_dir='{data_dir}', file_format='array_record').download_and_prepare()\""
  )
