"""Changes of bytes, and of the contents of containers, with checksums mended."""

import io
import struct
import warnings
import zipfile
import zlib

import numpy as np

_NUMBERS = (
  *(0, 1, 2, 127, 128, 255),
  *(2**n - i for n in (15, 16, 31, 32, 63, 64) for i in (0, 1)),
)
_TOKENS = (*(b"9" * 20, b"-1", b"1e999", b"NaN", b"null", b"[", b"{", b'"'), b"|O", b"<f8", b"True")
_TOKENS += (b"../", b"\n", b"\0")


def mutate(rng: np.random.Generator, content: bytes) -> bytes:
  """One to four changes of bytes."""
  for _ in range(rng.integers(1, 5)):
    content = _changed(rng, content) or b"\0"
  return content


def _changed(rng: np.random.Generator, content: bytes) -> bytes:
  at = _place(rng, content)
  put = lambda at, new: content[:at] + new + content[at + len(new) :]
  match rng.integers(9):
    case 0:
      return put(at, bytes([content[at] ^ (1 << rng.integers(8))]))
    case 1:
      return put(at, bytes([rng.integers(256)]))
    case 2 | 3:  # maybe a length or a size: a number at the edge of some type
      size, order = (2, 4, 8)[rng.integers(3)], ("little", "big")[rng.integers(2)]
      number = (*_NUMBERS, len(content))[rng.integers(len(_NUMBERS) + 1)]
      return put(at, (number % 256**size).to_bytes(size, order))
    case 4:
      token = _TOKENS[rng.integers(len(_TOKENS))]
      return content[:at] + token + content[at + rng.integers(2) * len(token) :]
    case 5:  # another digit: a shape or an offset in a text
      digits = [i for i, byte in enumerate(content[:4000]) if 48 <= byte <= 57] or [at]
      return put(digits[rng.integers(len(digits))], bytes([48 + rng.integers(10)]))
    case 6:
      return content[:at]
    case 7:
      return content[:at] + content[at + rng.integers(1, 100) :]
  begin = _place(rng, content)
  return content[:at] + content[begin : begin + rng.integers(1, 500)] + content[at:]


def _place(rng: np.random.Generator, content: bytes) -> int:
  """Anywhere, but half of the time near one of the ends, where headers are."""
  at = rng.integers(len(content))
  near = int(min(at, rng.integers(1, 200)))
  return int((at, at, near, len(content) - 1 - near)[rng.integers(4)])


def inside_zip(rng: np.random.Generator, content: bytes) -> bytes:
  """Changes a member, its name or the comment, or drops one, and packs them anew."""
  with zipfile.ZipFile(io.BytesIO(content)) as archive:
    members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    comment = archive.comment
  for _ in range(rng.integers(1, 3)):
    name, inner = members.pop(i := rng.integers(len(members)))
    choice = rng.integers(10)
    if choice == 0:
      name = mutate(rng, name.encode()).decode("latin-1")
    elif choice == 2 and comment:
      comment = mutate(rng, comment)
    elif choice > 1:
      inner = mutate(rng, inner)
    if choice != 1 or not members:
      members.insert(i, (name, inner))
  file, method = io.BytesIO(), (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)[rng.integers(2)]
  with warnings.catch_warnings(), zipfile.ZipFile(file, "w", method) as archive:
    warnings.simplefilter("ignore")  # of names that come twice
    for name, inner in members:
      archive.writestr(name.replace("\0", "") or "a", inner)
    archive.comment = comment
  return file.getvalue()


def inside_safetensors(rng: np.random.Generator, content: bytes) -> bytes:
  """Changes the header and gives it its new length."""
  start = 8 + int.from_bytes(content[:8], "little")
  text = mutate(rng, content[8:start])
  return struct.pack("<Q", len(text)) + text + content[start:]


def inside_png(rng: np.random.Generator, content: bytes) -> bytes:
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
