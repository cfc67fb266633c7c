"""Downloads from a server on this machine; other names of files."""

import contextlib
import hashlib
import http.server
import io
import pathlib
import threading

import fsspec
import jax
import numpy as np
import pytest
import requests

from mixer_jax import models, pretrained
from mixer_jax.errors import UserError
from mixer_jax.pretrained import catalog
from tests.pretrained import pytorch_files
from tests.pretrained.conftest import safetensors


def weights_file(value=1.0):
  buffer = io.BytesIO()
  np.savez(buffer, **{"MixerBlock_0/LayerNorm_0/scale": np.full(300_000, value, np.float32)})
  return buffer.getvalue()


GOOD = weights_file()
GOOD_SHA = hashlib.sha256(GOOD).hexdigest()


NAME, LONG = "MixerBlock_0/LayerNorm_0/scale", np.ones(300_000, np.float32)
FILES = {
  ".npz": GOOD,
  ".safetensors": safetensors({NAME: ("F32", LONG)}),
  ".pth": pytorch_files.content({NAME: pytorch_files.Tensor(LONG)}),
  ".pt": pytorch_files.content({NAME: pytorch_files.Tensor(LONG)}, before_archives=True),
}


class Handler(http.server.BaseHTTPRequestHandler):
  """Serves GOOD, or goes wrong as the path says."""

  def do_GET(self):
    self.server.requests.append(self.path)
    if "forbidden" in self.path:
      return self.send_error(403)
    good = FILES[pathlib.PurePath(self.path).suffix] if "short" in self.path else GOOD
    content = b"<html>Please log in</html>" if "page" in self.path else good
    self.send_response(200)
    if "unknown" not in self.path:
      self.send_header("Content-Length", str(len(content)))
    self.end_headers()
    self.wfile.write(content[: len(content) // 2] if "short" in self.path else content)

  def log_message(self, *args):
    pass


@pytest.fixture
def server(monkeypatch):
  monkeypatch.setenv("no_proxy", "*")
  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
    server.requests = []
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def value(weights):
  return weights.arrays[NAME][0]


@pytest.mark.parametrize("path", ["w.npz", "unknown/w.npz?key=1", "a%20b/.."])
@pytest.mark.first(1)
def test_a_download_is_kept_and_verified(server, tmp_path, path):
  url, cache = f"{server.url}/{path}", tmp_path / "deep" / "cache"
  for _ in range(3):
    weights = pretrained.read(url, str(cache))
    assert (value(weights), weights.sha256, weights.source) == (1.0, GOOD_SHA, url)
  assert len(server.requests) == 1
  (folder,) = cache.iterdir()
  # In the form that `sha256sum --check` takes.
  kept, sums = sorted(folder.iterdir())
  assert kept.read_bytes() == GOOD
  assert sums.read_text() == f"{GOOD_SHA}  {kept.name}\n"


def test_a_kept_file_that_changed_is_downloaded_again(server, tmp_path):
  url = f"{server.url}/w.npz"
  pretrained.read(url, str(tmp_path))
  (folder,) = tmp_path.iterdir()
  (folder / "w.npz").write_bytes(weights_file(2.0))
  assert value(pretrained.read(url, str(tmp_path))) == 1.0
  assert (folder / "w.npz").read_bytes() == GOOD
  assert len(server.requests) == 2
  # Only the same file takes its place.
  (folder / "w.npz").unlink()
  (folder / "w.npz.sha256").write_text(f"{'0' * 64}  w.npz\n")
  with pytest.raises(UserError, match=str(folder)):
    pretrained.read(url, str(tmp_path))
  assert [p.name for p in folder.iterdir()] == ["w.npz.sha256"]


def test_a_download_that_broke_off_before_the_end_starts_anew(server, tmp_path, monkeypatch):
  """The record is written first, so that there is no file without one."""
  with monkeypatch.context() as context:
    context.setattr("shutil.move", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(UserError, match="cannot be kept in .*: no space left"):
      pretrained.read(f"{server.url}/w.npz", str(tmp_path))
  (folder,) = tmp_path.iterdir()
  assert [p.name for p in folder.iterdir()] == ["w.npz.sha256"]
  assert value(pretrained.read(f"{server.url}/w.npz", str(tmp_path))) == 1.0


@pytest.mark.parametrize(
  "path",
  [
    *("forbidden.npz", "short.npz", "page.npz", "unknown-short.npz"),
    *("unknown-short.safetensors", "unknown-short.pth", "unknown-short.pt"),
  ],
)
def test_a_bad_download_is_refused_and_not_kept(server, tmp_path, path):
  for _ in range(2):
    with pytest.raises(UserError, match=path):
      pretrained.read(f"{server.url}/{path}", str(tmp_path))
  assert len(server.requests) == 2
  assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_unreachable_servers_and_folders(server, tmp_path):
  with pytest.raises(UserError, match="^http://127.0.0.1:1/w.npz: .*Connection refused"):
    pretrained.read("http://127.0.0.1:1/w.npz", str(tmp_path))
  (tmp_path / "file").touch()
  with pytest.raises(UserError, match="cannot be kept in .*/file/cache/.*: .*Not a dir"):
    pretrained.read(f"{server.url}/w.npz", str(tmp_path / "file" / "cache"))


def known_at(monkeypatch, name, *urls):
  """Makes the catalog say that a file is there."""
  entry = pretrained.CATALOG[name]._replace(urls=urls)
  monkeypatch.setitem(catalog.CATALOG, name, entry)


def test_the_published_checksum_is_checked(server, tmp_path, monkeypatch):
  name = "timm/mixer_b16_224.miil_in21k_ft_in1k"
  good, bad = f"{server.url}/x-{GOOD_SHA[:8]}.pth", f"{server.url}/x-0123abcd.pth"
  # Of other files nobody knows whether these digits are a checksum.
  assert value(pretrained.read(bad, str(tmp_path / "1"))) == 1.0
  known_at(monkeypatch, name, bad, good)
  expected = f"SHA-256 is {GOOD_SHA}, the published one 0123abcd...; the same weights: {good}$"
  with pytest.raises(UserError, match=expected):
    pretrained.read(name, str(tmp_path / "2"))
  weights = pretrained.read(good, str(tmp_path / "2"))
  assert (value(weights), weights.normalization) == (1.0, catalog.ZERO_TO_ONE)


@pytest.fixture
def refusing(monkeypatch):
  """Notes requests to the network, and answers 403."""
  asked = []

  def send(self, request, **_):
    asked.append(request.url)
    answer = requests.Response()
    answer.status_code, answer.reason, answer.url = 403, "Forbidden", request.url
    return answer

  monkeypatch.setattr(requests.Session, "send", send)
  return asked


@pytest.mark.parametrize(
  "source",
  [
    "google/imagenet21k/Mixer-L_16",
    "gs://mixer_models/imagenet21k/Mixer-L_16.npz",
    "https://storage.googleapis.com/mixer_models/imagenet21k/Mixer-L_16.npz",
  ],
)
def test_googles_bucket_and_the_second_source(refusing, tmp_path, source):
  with pytest.raises(UserError) as caught:
    pretrained.read(source, str(tmp_path))
  assert str(caught.value).endswith("timm/mixer_l16_224.goog_in21k")
  assert refusing == ["https://storage.googleapis.com/mixer_models/imagenet21k/Mixer-L_16.npz"]


def test_other_file_systems_come_by_fsspec(tmp_path):
  with fsspec.open("memory://weights/w.npz", "wb") as file:
    file.write(GOOD)
  assert value(pretrained.read("memory://weights/w.npz", str(tmp_path))) == 1.0
  for url in ("memory://weights/absent.npz", "carrierpigeon://w.npz"):
    with pytest.raises(UserError, match=url):
      pretrained.read(url, str(tmp_path))


# The listing of Google's bucket in vit_jax.ipynb, in MiB.
LISTED_MIB = {
  "google/imagenet1k/Mixer-B_16": 228.47,
  "google/imagenet1k/Mixer-L_16": 794.29,
  "google/imagenet21k/Mixer-B_16": 289.61,
  "google/imagenet21k/Mixer-L_16": 875.78,
  "google/gsam/Mixer-B_16": 228.47,
  "google/gsam/Mixer-B_32": 230.04,
  "google/gsam/Mixer-S_16": 70.71,
  "google/gsam/Mixer-S_32": 72.91,
  "google/gsam/Mixer-S_8": 78.79,
  "google/sam/Mixer-B_16": 228.47,
  "google/sam/Mixer-B_32": 230.04,
}


@pytest.mark.thorough
def test_models_of_the_catalog_have_the_size_of_googles_files():
  for name, mib in LISTED_MIB.items():
    entry = pretrained.CATALOG[name]
    model = models.build(entry.model, entry.num_classes, **entry.overrides)
    images = np.zeros((1, 224, 224, 3))
    params = jax.eval_shape(model.init, jax.random.key(0), images)
    # Four bytes a number, and names and headers of a few hundred bytes an array.
    assert mib - 0.12 < sum(4 * p.size for p in jax.tree.leaves(params)) / 2**20 <= mib, name
  assert LISTED_MIB.keys() == {n for n in pretrained.CATALOG if n.startswith("google/")}


def test_the_catalog_agrees_with_itself_and_the_models():
  for name, entry in pretrained.CATALOG.items():
    patch_size = (models.fields(entry.model) | entry.overrides).get("patch_size", 1)
    assert 224 % patch_size == 0
    assert not entry.second_source or entry.second_source in pretrained.CATALOG
    assert all(catalog.find(source) is entry for source in (name, *entry.urls))


def test_a_known_file_is_known_by_its_contents(monkeypatch, tmp_path):
  """The arrays of a file of timm's do not tell its normalization; its checksum does."""
  path = tmp_path / "renamed"
  path.write_bytes(GOOD)
  assert pretrained.read(str(path)).normalization == catalog.MINUS_ONE_TO_ONE
  name, url = "timm/mixer_b16_224.miil_in21k_ft_in1k", f"https://a.org/m-{GOOD_SHA[:8]}.pth"
  known_at(monkeypatch, name, url)
  assert pretrained.read(str(path)).normalization == catalog.ZERO_TO_ONE


def test_local_files_need_no_network(refusing, peer):
  with contextlib.chdir("/"):
    pretrained.read(peer("google_mixer").path)
  assert not refusing
