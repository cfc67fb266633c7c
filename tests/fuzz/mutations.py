"""Changes of bytes, and of the contents of containers, with checksums mended."""

import io
import struct
import warnings
import zipfile
import zlib

import numpy as np

_INTERESTING = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)  # fmt: skip
_TOKENS = (b"9" * 20, b"-1", b"1e999", b"NaN", b"null", b"[", b"{", b'"', b"|O", b"<f8", b"True", b"../", b"\n", b"\0")  # fmt: skip


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
  """Some bytes, maybe a length or a size, become a number at the edge of some type."""
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


def inside_zip(rng, content: bytes) -> bytes:
  """Changes members or their names and packs them anew."""
  with zipfile.ZipFile(io.BytesIO(content)) as archive:
    members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    comment = archive.comment
  for _ in range(rng.integers(1, 3)):
    i = rng.integers(len(members))
    name, inner = members[i]
    choice = rng.integers(10)
    if choice == 0:
      name = mutate(rng, name.encode()).decode("latin-1")
    elif choice == 1:
      del members[i]
      members = members or [("a.npy", b"")]
      continue
    elif choice == 2 and comment:
      comment = mutate(rng, comment)
    else:
      inner = mutate(rng, inner)
    members[i] = (name, inner)
  file, method = io.BytesIO(), (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)[rng.integers(2)]
  with warnings.catch_warnings(), zipfile.ZipFile(file, "w", method) as archive:
    warnings.simplefilter("ignore")  # of names that come twice
    for name, inner in members:
      archive.writestr(name.replace("\0", "") or "a", inner)
    archive.comment = comment
  return file.getvalue()


def inside_safetensors(rng, content: bytes) -> bytes:
  """Changes the header and gives it its new length."""
  start = 8 + int.from_bytes(content[:8], "little")
  text = mutate(rng, content[8:start])
  return struct.pack("<Q", len(text)) + text + content[start:]


def inside_png(rng, content: bytes) -> bytes:
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
