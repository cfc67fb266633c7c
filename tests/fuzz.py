"""Mutates small valid files and watches what their readers make of them.

  python -m tests.fuzz [--cases=20000] [--seed=0] [--save=DIR]

A case may be read, or refused with one line. Anything else is a fault: another
exception, a warning, seconds of computing, hundreds of megabytes. Its file is
kept in DIR. Half of the mutations are made inside the containers, with their
checksums mended, so that they reach the readers behind them.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import io
import json
import pathlib
import resource
import signal
import struct
import sys
import tempfile
import time
from typing import Callable
import warnings
import zipfile
import zlib

import jax
import ml_collections
import numpy as np
from PIL import Image

from mixer_jax import data, pretrained
from mixer_jax.data import decode
from mixer_jax.errors import UserError
from mixer_jax.models import mixer

_SECONDS = 5  # of computing a case
_WAITING = 120  # seconds of a clock a case: a pipe, a lock
_MEGABYTES = 1500  # more than before the first case: an image may have 89 million pixels
_INTERESTING = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)  # fmt: skip
_TOKENS = (b"9" * 20, b"-1", b"1e999", b"NaN", b"null", b"[", b"{", b'"', b"|O", b"<f8", b"True", b"../", b"\n", b"\0")  # fmt: skip


class Fault(Exception):
  """A reader did what it must not."""


def model() -> mixer.Mixer:
  return mixer.Mixer(
    num_classes=3, patch_size=4, hidden_dim=4, num_blocks=1, tokens_mlp_dim=4, channels_mlp_dim=4
  )


@functools.cache
def template():
  """Shapes of the parameters of `model` on images of 8x8."""
  return jax.eval_shape(model().init, jax.random.key(0), np.zeros((1, 8, 8, 3)))["params"]


@functools.cache
def params():
  rng = np.random.default_rng(0)
  return jax.tree.map(lambda x: rng.normal(0, 0.1, x.shape).astype(np.float32), template())


def arrays() -> dict[str, np.ndarray]:
  flat = jax.tree_util.tree_leaves_with_path(params())
  return {"/".join(key.key for key in path): leaf for path, leaf in flat}


# --- the files to begin with ---


def _npz(savez) -> bytes:
  file = io.BytesIO()
  savez(file, **arrays())
  return file.getvalue()


def _saved() -> bytes:
  with tempfile.TemporaryDirectory() as directory:
    path = pathlib.Path(directory, "w.npz")
    pretrained.save(path, params(), model(), pretrained.Normalization((0.5,) * 3, (0.5,) * 3))
    return path.read_bytes()


def _safetensors(dtype="<f4", kind="F32") -> bytes:
  header, content = {"__metadata__": {"format": "pt"}}, b""
  for name, array in arrays().items():
    begin = len(content)
    content += array.astype(dtype).tobytes()
    header[name] = dict(dtype=kind, shape=array.shape, data_offsets=[begin, len(content)])
  text = json.dumps(header).encode()
  return struct.pack("<Q", len(text)) + text + content


def _torch(**options) -> bytes:
  import torch

  file = io.BytesIO()
  torch.save({"model": {k: torch.tensor(v) for k, v in arrays().items()}}, file, **options)
  return file.getvalue()


def _data() -> bytes:
  rng, file = np.random.default_rng(0), io.BytesIO()
  images = rng.integers(0, 255, (4, 3, 2, 3), np.uint8)
  labels = np.arange(4) % 2
  np.savez(file, train_images=images, train_labels=labels, test_images=images,
           test_labels=labels, class_names=np.array(["cat", "dog"]))  # fmt: skip
  return file.getvalue()


def _image(form: str, mode: str = "RGB", **options) -> bytes:
  rng, file = np.random.default_rng(0), io.BytesIO()
  image = Image.fromarray(rng.integers(0, 255, (9, 12, 3), np.uint8))
  image = image.quantize(8) if mode == "P" else image.convert(mode)
  image.save(file, form, **options)
  return file.getvalue()


def _grey16() -> bytes:
  file = io.BytesIO()
  Image.fromarray(np.arange(70, dtype=np.uint16).reshape(7, 10) * 900).save(file, "PNG")
  return file.getvalue()


def _with_exif() -> bytes:
  exif = Image.Exif()
  exif[0x0112], exif[0x010E] = 6, "turned"
  return _image("JPEG", exif=exif)


# --- their readers ---


def read_weights(path: pathlib.Path, outer: bool) -> None:
  """Everything that fine-tuning does with a file."""
  weights = pretrained.read(str(path))
  original = arrays()
  for name, array in weights.arrays.items():
    if array.dtype != np.float32 or not np.isfinite(array).all():
      raise Fault(f"{name} is read as {array.dtype}, or not finite")
    # What lies in an archive has a checksum: bytes that were changed are not read.
    archived = outer and zipfile.is_zipfile(path) and name in original
    if archived and not np.array_equal(array, original[name]):
      raise Fault(f"{name} is read with other numbers than were written")
  _ = weights.num_classes, weights.num_tokens, weights.patch_size
  for resize in ("", "block_diagonal", "interpolate_bilinear"):
    with contextlib.suppress(UserError):
      weights.model_fields(16, resize)
  fitted = weights.fit(template())
  if jax.tree.map(np.shape, fitted) != jax.tree.map(lambda x: x.shape, template()):
    raise Fault("what is fitted has other shapes")


def read_image(path: pathlib.Path, outer: bool) -> None:
  del outer
  records = decode.Records(1, "", lambda _: (path.read_bytes(), 0), lambda _: str(path))
  for stored_size in (0, 5):
    images, _ = decode.decode_all(records, stored_size, lambda shape: np.empty(shape, np.uint8))
    image = images[0]
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
      raise Fault(f"an image becomes {image.dtype} {image.shape}")
    if stored_size and image.shape != (5, 5, 3):
      raise Fault(f"a stored image has the shape {image.shape}")


def read_data(path: pathlib.Path, outer: bool) -> None:
  del outer
  config = dict(name="npz", dir=str(path), cache_dir="", train_split="train",
                test_split="test[:50%]", stored_size=0)  # fmt: skip
  dataset = data.load(ml_collections.ConfigDict(config))
  if dataset.train.images.dtype != np.uint8 or dataset.train.labels.max() >= dataset.num_classes:
    raise Fault("the data are not what they must be")


@dataclasses.dataclass(frozen=True)
class Seed:
  """A valid file.

  Attributes:
    content: its bytes.
    read: its reader, told the path and whether the mutation mended no checksum.
    inside: mutates within the container, or None.
  """

  content: bytes
  read: Callable[[pathlib.Path, bool], None]
  inside: Callable[[np.random.Generator, bytes], bytes] | None = None


def seeds() -> dict[str, Seed]:
  """All kinds of files; those of PyTorch where it is installed."""
  found = {
    "npz": Seed(_npz(np.savez), read_weights, _inside_zip),
    "npz, compressed": Seed(_npz(np.savez_compressed), read_weights, _inside_zip),
    "npz, saved here": Seed(_saved(), read_weights, _inside_zip),
    "safetensors": Seed(_safetensors(), read_weights, _inside_safetensors),
    "safetensors, float16": Seed(_safetensors("<f2", "F16"), read_weights, _inside_safetensors),
    "data npz": Seed(_data(), read_data, _inside_zip),
    "png": Seed(_image("PNG"), read_image, _inside_png),
    "png, palette": Seed(_image("PNG", "P", transparency=1), read_image, _inside_png),
    "png, 16 bit": Seed(_grey16(), read_image, _inside_png),
    "png, grey and alpha": Seed(_image("PNG", "LA"), read_image, _inside_png),
    "jpeg": Seed(_with_exif(), read_image),
    "jpeg, progressive cmyk": Seed(_image("JPEG", "CMYK", progressive=True), read_image),
    "webp": Seed(_image("WEBP"), read_image),
    "bmp": Seed(_image("BMP"), read_image),
  }
  try:
    found["pth"] = Seed(_torch(), read_weights, _inside_zip)
    old = _torch(_use_new_zipfile_serialization=False)
    found["pth before 1.6"] = Seed(old, read_weights)
  except ImportError:
    pass
  return found


# --- mutations ---


def mutate(rng: np.random.Generator, content: bytes) -> bytes:
  """One to four changes of bytes."""
  for _ in range(rng.integers(1, 5)):
    content = _CHANGES[rng.integers(len(_CHANGES))](rng, content) or b"\0"
  return content


def _place(rng, content: bytes) -> int:
  """Anywhere, but half of the time near one of the ends, where headers are."""
  at = rng.integers(len(content))
  near = int(min(at, rng.integers(1, 200)))
  return int((at, at, near, len(content) - 1 - near)[rng.integers(4)])


def _put(content: bytes, at: int, new: bytes) -> bytes:
  return content[:at] + new + content[at + len(new) :]


def _flip(rng, content):
  at = _place(rng, content)
  return _put(content, at, bytes([content[at] ^ (1 << rng.integers(8))]))


def _byte(rng, content):
  return _put(content, _place(rng, content), bytes([rng.integers(256)]))


def _number(rng, content):
  """What may be a length or a size becomes a number at the edge of some type."""
  size, order = (2, 4, 8)[rng.integers(3)], ("little", "big")[rng.integers(2)]
  number = (*_INTERESTING, len(content))[rng.integers(len(_INTERESTING) + 1)]
  return _put(content, _place(rng, content), (number % 256**size).to_bytes(size, order))


def _token(rng, content):
  at, token = _place(rng, content), _TOKENS[rng.integers(len(_TOKENS))]
  return content[:at] + token + content[at + rng.integers(2) * len(token) :]


def _digit(rng, content):
  """Another digit: a shape or an offset in a text."""
  digits = [i for i, byte in enumerate(content[:4000]) if 48 <= byte <= 57]
  if not digits:
    return _byte(rng, content)
  return _put(content, digits[rng.integers(len(digits))], bytes([48 + rng.integers(10)]))


def _cut(rng, content):
  return content[: _place(rng, content)]


def _remove(rng, content):
  at = _place(rng, content)
  return content[:at] + content[at + rng.integers(1, 100) :]


def _repeat(rng, content):
  begin, at = _place(rng, content), _place(rng, content)
  return content[:at] + content[begin : begin + rng.integers(1, 500)] + content[at:]


_CHANGES = (_flip, _flip, _byte, _number, _number, _token, _digit, _digit, _cut, _remove, _repeat)


def _inside_zip(rng, content: bytes) -> bytes:
  """Changes members or their names and packs them anew."""
  with zipfile.ZipFile(io.BytesIO(content)) as archive:
    members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    comment = archive.comment
  for _ in range(rng.integers(1, 3)):
    i = rng.integers(len(members))
    name, inner = members[i]
    what = rng.integers(10)
    if what == 0:
      name = mutate(rng, name.encode()).decode("latin-1")
    elif what == 1:
      del members[i]
      members = members or [("a.npy", b"")]
      continue
    elif what == 2 and comment:
      comment = mutate(rng, comment)
    else:
      inner = mutate(rng, inner)
    members[i] = (name, inner)
  file, method = io.BytesIO(), (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)[rng.integers(2)]
  with zipfile.ZipFile(file, "w", method) as archive:
    for name, inner in members:
      archive.writestr(name.replace("\0", "") or "a", inner)
    archive.comment = comment
  return file.getvalue()


def _inside_safetensors(rng, content: bytes) -> bytes:
  """Changes the header and gives it its new length."""
  start = 8 + int.from_bytes(content[:8], "little")
  text = mutate(rng, content[8:start])
  return struct.pack("<Q", len(text)) + text + content[start:]


def _inside_png(rng, content: bytes) -> bytes:
  """Changes a chunk and mends its checksum."""
  chunks, at = [], 8
  while at < len(content):
    length = int.from_bytes(content[at : at + 4], "big")
    chunks.append((content[at + 4 : at + 8], content[at + 8 : at + 8 + length]))
    at += 12 + length
  i = rng.integers(len(chunks))
  kind, inner = chunks[i]
  chunks[i] = (kind, mutate(rng, inner or b"\0"))
  return content[:8] + b"".join(
    struct.pack(">I", len(c)) + k + c + struct.pack(">I", zlib.crc32(k + c)) for k, c in chunks
  )


# --- running ---


@contextlib.contextmanager
def _bounded():
  """Raises a Fault within code that computes or waits for too long."""

  def fail(number, frame):
    raise Fault(f"more than {_SECONDS} s of computing or {_WAITING} s of waiting")

  timers = ((signal.SIGPROF, signal.ITIMER_PROF, _SECONDS), (signal.SIGALRM, signal.ITIMER_REAL, _WAITING))  # fmt: skip
  before = [signal.signal(number, fail) for number, _, _ in timers]
  for _, timer, seconds in timers:
    signal.setitimer(timer, seconds)
  try:
    yield
  finally:
    for (number, timer, _), handler in zip(timers, before):
      signal.setitimer(timer, 0)
      signal.signal(number, handler)


def _peak() -> float:
  """Largest memory of the process so far, in MB."""
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def judge(read: Callable[[], None], started_with: float) -> str:
  """What became of a case: "read", "refused", or the fault in a line."""
  with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    try:
      with _bounded():
        read()
      outcome = "read"
    except UserError as e:
      line = str(e)
      bad = len(line) > 2000 or not line.isprintable()
      outcome = f"fault: the message is {line[:200]!r}" if bad else "refused"
    except BaseException as e:  # whatever it is, it is what the fuzzer looks for
      if isinstance(e, KeyboardInterrupt):
        raise
      outcome = f"fault: {type(e).__name__}: {' '.join(str(e).split())[:200]}"
  if said and not outcome.startswith("fault"):
    outcome = f"fault: the warning {said[0].category.__name__}: {said[0].message}"
  if _peak() - started_with > _MEGABYTES:
    outcome = f"fault: {_peak() - started_with:.0f} MB of memory"
  return outcome


def run(cases: int, seed: int, save: pathlib.Path) -> dict[str, collections.Counter]:
  """Tries cases of all kinds in turn; returns outcomes by kind and prints new faults.

  Args:
    cases: how many.
    seed: of the mutations; a case depends on it and on its number alone.
    save: where files that show a fault are kept.
  """
  files, results = seeds(), collections.defaultdict(collections.Counter)
  path, known = save / "case", set()
  save.mkdir(parents=True, exist_ok=True)
  for name, file in files.items():  # the seeds themselves are read; this warms up, too
    path.write_bytes(file.content)
    if (outcome := judge(lambda file=file: file.read(path, True), 1e9)) != "read":
      raise Fault(f"the seed {name}: {outcome}")
  started_with = _peak()
  for number in range(cases):
    name = list(files)[number % len(files)]
    file, rng = files[name], np.random.default_rng((seed, number))
    outer = file.inside is None or bool(rng.integers(2))
    path.write_bytes(mutate(rng, file.content) if outer else file.inside(rng, file.content))
    outcome = judge(lambda: file.read(path, outer), started_with)  # noqa: B023
    results[name][outcome] += 1
    if outcome.startswith("fault"):
      path.replace(save / f"{number}-{name.replace(' ', '_')}")
      started_with = max(started_with, _peak() - _MEGABYTES)
      if outcome not in known:
        known.add(outcome)
        print(f"case {number}, {name}: {outcome}", flush=True)
  path.unlink(missing_ok=True)
  return results


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--cases", type=int, default=20_000)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--save", type=pathlib.Path, default=pathlib.Path("fuzz-cases"))
  options = parser.parse_args()
  start = time.monotonic()
  results = run(options.cases, options.seed, options.save)
  faults = 0
  print("| file | cases | read | refused | faults |\n| --- | --: | --: | --: | --: |")
  for name, counts in results.items():
    bad = counts.total() - counts["read"] - counts["refused"]
    print(f"| {name} | {counts.total()} | {counts['read']} | {counts['refused']} | {bad} |")
    faults += bad
  cpu = time.process_time()
  print(f"{options.cases} cases, {faults} faults, {time.monotonic() - start:.0f} s ({cpu:.0f} s of computing), {_peak():.0f} MB")  # fmt: skip
  sys.exit(faults > 0)


if __name__ == "__main__":
  main()
