"""Files from here and elsewhere: download once (by pooch), keep, and verify at every use.

A download lies in CACHE/NAME-KEY/NAME, with its checksum in NAME.sha256 beside it (for
`sha256sum --check`). The file appears by one rename, after its checksum and a look at its
contents, so readers see all of it or nothing, and programs that start together do no harm.
"""

import difflib
import hashlib
import importlib.util
import json
import logging
import os
import pathlib
import re
import shutil
import sys
from typing import Any
import urllib.parse

from mixer_jax.errors import UserError, as_user_error
from mixer_jax.paths import cache_path, sha256, user_path
from mixer_jax.pretrained import catalog, containers

_LOG = logging.getLogger(__name__)

_TIMEOUT = 60  # seconds without a byte


def local(source: str, cache_dir: str = "") -> tuple[pathlib.Path, str]:
  """A file's path and its SHA-256 in hexadecimal digits; it is downloaded if it is not kept.

  Arguments and errors are those of `pretrained.read`; an address may have any scheme that
  fsspec has a package for.
  """
  entry = catalog.find(source)
  url = entry.urls[0] if entry and entry.name == source else source
  if "://" not in url:
    return _here(source)
  name = pathlib.PurePosixPath(urllib.parse.urlsplit(url).path).name[-100:]
  name = re.sub(r"[^A-Za-z0-9_.-]", "_", name).lstrip(".") or "weights"
  cache = user_path(cache_dir) if cache_dir else cache_path() / "weights"
  path = cache / f"{name}-{hashlib.sha256(url.encode()).hexdigest()[:16]}" / name
  try:
    return path, _kept(url, path, catalog.published_sha256(url) if entry else "")
  except UserError as error:
    others = [*entry.urls, entry.second_source] if entry else []
    if not (others := [other for other in others if other and other != url]):
      raise
    raise UserError(f"{error}; the same weights: {', '.join(others)}") from error


def _here(source: str) -> tuple[pathlib.Path, str]:
  """The path and the SHA-256 of a file on this machine."""
  path = user_path(source)
  if not os.path.exists(path):  # Path's raises where it may not look
    near = difflib.get_close_matches(source, catalog.CATALOG)
    hint = f"; public files with a near name: {', '.join(near)}" if near else ""
    raise UserError(f"{source}: no such file, and no such directory of a run{hint}")
  with as_user_error(f"{source}: cannot be read", OSError):
    return path, sha256(path)


def config_beside(path: pathlib.Path) -> dict[str, Any]:
  """What a config.json beside a file says; {} without one. A UserError if it is damaged."""
  config = path.with_name("config.json")
  if not config.is_file():
    return {}
  with as_user_error(f"{config}: is no JSON object"):
    return dict(json.loads(config.read_bytes()))


def _kept(url: str, path: pathlib.Path, published: str) -> str:
  """The SHA-256 of a download, kept or new, which must begin with the digits `published`."""
  import pooch  # late: its progress bar warns in a notebook without ipywidgets

  pooch.get_logger().setLevel(logging.WARNING)  # or it prints advice for its own users
  record = path.with_name(f"{path.name}.sha256")

  def download(url: str, to: str, _: Any) -> None:
    _LOG.info("Downloading %s to %s", url, path.parent)
    _fetch(url, to)
    try:  # a page of a proxy, say, or a file whose length nobody told and that was cut off
      containers.read(pathlib.Path(to))
    except UserError as error:
      raise UserError(f"{url}: the download is not kept: {error}") from error
    if not (found := sha256(to)).startswith(published):
      raise UserError(f"{url}: the file's SHA-256 is {found}, the published one {published}...")
    if not record.exists():
      record.write_text(f"{found}  {path.name}\n")

  known = record.read_text().partition(" ")[0] if record.exists() else None
  try:
    kept: Any = dict(fname=path.name, path=path.parent, downloader=download)
    pooch.retrieve(url, known, **kept)
    return record.read_text().partition(" ")[0]
  except ValueError as error:  # pooch's, of another checksum
    differs = f"its SHA-256 is not that of the first download, {known}"
    raise UserError(f"{url}: {differs}; delete {path.parent} to take it") from error
  except OSError as error:
    raise UserError(f"{url}: cannot be kept in {path.parent}: {error}") from error


def _fetch(url: str, to: str) -> None:
  scheme, _, rest = url.partition("://")
  # Public buckets need no credentials on Google's HTTPS server.
  if scheme == "gs" and importlib.util.find_spec("gcsfs") is None:
    scheme, url = "https", "https://storage.googleapis.com/" + urllib.parse.quote(rest)
  with as_user_error(url):  # the packages raise anything
    if scheme in ("http", "https"):
      import pooch

      shows, headers = sys.stderr.isatty(), {"User-Agent": "mixer_jax"}
      fetch = pooch.HTTPDownloader(shows, 2**20, timeout=_TIMEOUT, headers=headers)
      fetch(url, to, None)
    else:
      import fsspec

      with fsspec.open(url, "rb") as remote, open(to, "wb") as file:
        shutil.copyfileobj(remote, file)  # pyright: ignore[reportArgumentType]
