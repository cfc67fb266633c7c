"""Files from here and elsewhere: download once, keep, and verify at every use.

What was downloaded lies in CACHE/NAME-KEY, with its checksum in NAME.sha256 beside
it (for `sha256sum --check`). Such a folder appears by one rename, so a reader sees
all of it or nothing, and programs that start together do no harm.
"""

import contextlib
import hashlib
import http.client
import importlib.util
import logging
import pathlib
import re
import shutil
import tempfile
from typing import BinaryIO, Iterator
import urllib.error
import urllib.parse
import urllib.request

import tqdm

from mixer_jax.errors import UserError
from mixer_jax.pretrained import catalog, containers

_LOG = logging.getLogger(__name__)

_CHUNK = 2**20
_TIMEOUT = 60  # seconds without a byte


def local(source: str, cache_dir: str = "") -> tuple[pathlib.Path, str]:
  """Finds a file, and downloads it if it is elsewhere and not kept yet.

  Args:
    source: a path, an address (https://, http://, gs:// or any other that fsspec
      has a package for), or a name of the catalog.
    cache_dir: where downloads are kept; "": ~/.cache/mixer_jax/weights.

  Returns:
    The file's path, and the SHA-256 of its contents in hexadecimal digits.

  Raises:
    UserError: there is no such file, it cannot be had, or a kept one has changed.
  """
  entry = catalog.find(source)
  url = entry.urls[0] if entry and entry.name == source else source
  if "://" not in url:
    path = pathlib.Path(source).expanduser()
    return path, _checked(source, path)
  name = pathlib.PurePosixPath(urllib.parse.urlsplit(url).path).name[-100:]
  name = re.sub(r"[^A-Za-z0-9_.-]", "_", name).lstrip(".") or "weights"
  cache = pathlib.Path(cache_dir or "~/.cache/mixer_jax/weights").expanduser()
  folder = cache / f"{name}-{hashlib.sha256(url.encode()).hexdigest()[:16]}"
  if not folder.exists():
    try:
      _download(url, name, folder, catalog.published_sha256(url) if entry else "")
    except UserError as error:
      others = [*entry.urls, entry.second_source] if entry else []
      others = [other for other in others if other and other != url]
      if not others:
        raise
      raise UserError(f"{error}; the same weights: {', '.join(others)}") from error
  return folder / name, _verified(folder, name)


def _checked(source: str, path: pathlib.Path) -> str:
  if not path.exists():
    near = catalog.near(source)
    hint = f"; public files with a near name: {', '.join(near)}" if near else ""
    raise UserError(f"{source}: no such file{hint}")
  if not path.is_file():
    raise UserError(f"{source}: is no file")
  try:
    return _sha256(path)
  except OSError as error:
    raise UserError(f"{source}: cannot be read: {error.strerror}") from error


def _verified(folder: pathlib.Path, name: str) -> str:
  """The checksum of a kept file, which must be the recorded one."""
  try:
    recorded = (folder / f"{name}.sha256").read_text().split()[0]
    found = _sha256(folder / name)
  except (OSError, ValueError, IndexError) as error:
    raise UserError(
      f"{folder}: cannot be read as a kept download ({error}); delete it to download again"
    ) from error
  if found != recorded:
    raise UserError(
      f"{folder / name}: its SHA-256 is {found}, but that of the download was {recorded};"
      " delete the folder to download again"
    )
  return found


def _sha256(path: pathlib.Path) -> str:
  with path.open("rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def _download(url: str, name: str, folder: pathlib.Path, published: str) -> None:
  """Fetches an address into a temporary folder and renames it to `folder`.

  Args:
    url: the address.
    name: of the file in the folder.
    folder: does not exist yet.
    published: first digits of the SHA-256 that the file must have.
  """
  _LOG.info("Downloading %s to %s", url, folder)
  temporary = None
  try:
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = pathlib.Path(tempfile.mkdtemp(prefix=".downloading-", dir=folder.parent))
    sha256 = _fetch(url, temporary / name)
    containers.kind(temporary / name)  # a page of a proxy, say, is not kept
    if not sha256.startswith(published):
      raise UserError(f"{url}: the file's SHA-256 is {sha256}, the published one {published}...")
    (temporary / f"{name}.sha256").write_text(f"{sha256}  {name}\n")
    try:
      temporary.rename(folder)
    except OSError:
      if not folder.exists():
        raise
      # Another process was quicker; its copy is as good.
  except OSError as error:
    raise UserError(f"{url}: cannot be kept in {folder.parent}: {error}") from error
  finally:
    if temporary:
      shutil.rmtree(temporary, ignore_errors=True)


def _fetch(url: str, path: pathlib.Path) -> str:
  """Writes what is at an address to a file and returns its SHA-256."""
  digest = hashlib.sha256()
  with contextlib.closing(_open(url)) as remote, path.open("wb") as file:
    size = _size(remote)
    # Without a terminal there is no bar; the log has a line then.
    with tqdm.tqdm(total=size, unit="B", unit_scale=True, desc=path.name, disable=None) as bar:
      for chunk in _chunks(url, remote):
        file.write(chunk)
        digest.update(chunk)
        bar.update(len(chunk))
    received = file.tell()
  if size is not None and received != size:
    raise UserError(f"{url}: the download ended after {received} of {size} bytes; run it again")
  return digest.hexdigest()


def _open(url: str) -> BinaryIO:
  """Opens an address for reading.

  A gs:// address goes to Google's public HTTPS server where gcsfs is missing:
  public buckets need no credentials.
  """
  scheme, _, rest = url.partition("://")
  if scheme == "gs" and importlib.util.find_spec("gcsfs") is None:
    scheme, url = "https", "https://storage.googleapis.com/" + urllib.parse.quote(rest)
  try:
    if scheme in ("http", "https"):
      request = urllib.request.Request(url, headers={"User-Agent": "mixer_jax"})
      return urllib.request.urlopen(request, timeout=_TIMEOUT)
    import fsspec

    return fsspec.open(url, "rb").open()
  except Exception as error:  # fsspec's packages raise what they like
    raise UserError(f"{url}: {_reason(error)}") from error


def _chunks(url: str, remote: BinaryIO) -> Iterator[bytes]:
  try:
    while chunk := remote.read(_CHUNK):
      yield chunk
  except Exception as error:
    raise UserError(f"{url}: the download broke off: {_reason(error)}; run it again") from error


def _size(remote: BinaryIO) -> int | None:
  """Bytes to come, if the other side says it."""
  if isinstance(remote, http.client.HTTPResponse):
    return remote.length
  return getattr(remote, "size", None)


def _reason(error: Exception) -> str:
  if isinstance(error, urllib.error.HTTPError):
    return f"the server answers {error.code} ({error.reason})"
  if isinstance(error, urllib.error.URLError):
    error = error.reason
  return (str(error) or type(error).__name__).splitlines()[0]
