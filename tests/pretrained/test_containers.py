"""Files that are damaged, hostile or something else are refused with one line."""

import io
import json
import pickle
import random
import struct
import warnings
import zipfile

from flax import traverse_util
import numpy as np
import pytest

from mixer_jax import pretrained
from mixer_jax.errors import UserError
from tests.pretrained.conftest import FAMILIES, random_params, safetensors, shapes

NAME = "MixerBlock_0/token_mixing/Dense_0/kernel"


def npz(savez=np.savez, **arrays):
  buffer = io.BytesIO()
  savez(buffer, **arrays)
  return buffer.getvalue()


def archive(*members, comment=b"", claimed=None):
  """A .zip; each member says that it unpacks to `claimed` bytes."""
  buffer = io.BytesIO()
  with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
    warnings.simplefilter("ignore")  # of names that come twice
    for name, content in members:
      file.writestr(name, content)
      file.getinfo(name).file_size = claimed or len(content)
    file.comment = comment
  return buffer.getvalue()


def npy(array):
  buffer = io.BytesIO()
  np.save(buffer, array)
  return buffer.getvalue()


def claims(shape):
  """An array of four numbers whose header says otherwise."""
  return npy(np.ones(4, np.float32)).replace(
    b"(4,), }" + b" " * 30, f"{shape}, }}".encode().ljust(37)
  )


def tampered(content, **changes):
  """A .safetensors file with one array whose header says otherwise."""
  start = 8 + int.from_bytes(content[:8], "little")
  header = json.loads(content[8:start])
  header[NAME] |= changes
  text = json.dumps(header).encode()
  return struct.pack("<Q", len(text)) + text + content[start:]


def with_header(text, data=b""):
  return struct.pack("<Q", len(text)) + text + data


def end_record(members, start, size):
  return struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, members, members, size, start, 0)


def noted(**fields):
  notes = {"mixer_jax": {"fields": fields, "normalization": None}}
  return archive((f"{NAME}.npy", npy(ONES)), comment=json.dumps(notes).encode())


ONES = np.ones((4, 2), np.float32)
GOOD_NPZ = npz(**{NAME: np.random.default_rng(0).normal(size=(64, 64))})
GOOD = safetensors({NAME: ("F32", ONES)})
GOOD_EMPTY = safetensors({NAME: ("F32", ONES[:0])})
TWO = safetensors({"a": ("F32", ONES), "b": ("F32", ONES)})

REFUSED = {
  "empty": (b"", "is empty"),
  "text": (b"these are no weights", "holds no weights.*npz, .safetensors and PyTorch's .pth"),
  "html": (b"<!DOCTYPE html><html>403</html>", "holds no weights"),
  "npy": (npy(ONES), "holds no weights"),
  "hdf5": (b"\x89HDF\r\n\x1a\n" + b"\0" * 50, "holds no weights"),
  "truncated": (GOOD_NPZ[: len(GOOD_NPZ) // 2], "is damaged or cut off"),
  "flipped": (GOOD_NPZ[:9000] + b"\xff\xff\xff" + GOOD_NPZ[9003:], "Bad CRC-32"),
  "compressed_flipped": (
    (c := npz(np.savez_compressed, **{NAME: ONES * np.pi}))[:100] + b"\xff" * 9 + c[109:],
    "is damaged",
  ),
  "no_arrays": (npz(), "holds no|cut off"),
  "pickled": (npz(**{NAME: np.array([{"a": 1}], object)}), "Object arrays cannot be loaded"),
  "integers": (npz(**{NAME: np.ones(3, np.int32)}), "holds int32, not floating-point"),
  "texts": (npz(**{NAME: np.array(["a"])}), "holds <U1, not floating-point"),
  "nan": (npz(**{NAME: np.array([1, np.nan])}), f"not all numbers are finite in {NAME}"),
  "infinite": (npz(**{NAME: np.array([1e300])}), f"not all numbers are finite in {NAME}"),
  "too_many": (archive((f"{NAME}.npy", claims((10**12,)))), "is damaged"),
  "negative": (archive((f"{NAME}.npy", claims((-4,)))), "is damaged"),
  "notes": (
    archive((f"{NAME}.npy", npy(ONES)), comment=b'{"mixer_jax": {"fields": {"x": 1}}}'),
    "the notes in the archive's comment are damaged",
  ),
  "notes_of_a_type": (noted(gelu=1.0), "the notes in the archive's comment are damaged"),
  "notes_as_text": (noted(gate_epsilon="1e-6"), "the notes in the archive's comment are damaged"),
  "bomb": (
    archive(*((f"{i}.npy", random.randbytes(200_000)) for i in range(6)), claimed=2 * 10**8),
    r"bytes would unpack to 1200000000",
  ),
  "claims_more": (archive((f"{NAME}.npy", claims((8,)))), "has 16 bytes, not those of float32"),
  "claims_less": (archive((f"{NAME}.npy", claims((2,)))), "has 16 bytes, not those of float32"),
  "no_numbers": (npz(**{NAME: np.ones((0, 10**6), np.float32)}), "has no numbers"),
  "odd_name": (archive(("a\x1b[2Jb.npy", npy(ONES))), "is no name of an array"),
  "long_name": (archive(("a" * 9000 + ".npy", npy(ONES))), "is no name of an array"),
  "many_not_finite": (
    npz(**{f"a{i}": np.array([np.nan]) for i in range(99)}),
    "finite in a0, .*a19 and 79 more",
  ),
  "st_no_numbers": (tampered(GOOD_EMPTY, shape=[0, 10**30]), "is damaged"),
  "st_newline": (safetensors({"a\nb": ("F32", ONES)}), "is no name of an array"),
  "st_huge_number": (tampered(GOOD, shape=[10**4000]), "is damaged"),
  "st_truncated": (GOOD[:-3], "file not fully covered"),
  "st_header_cut": (GOOD[:40], "invalid header length"),
  "st_huge_header": (struct.pack("<Q", 2**60) + b"{}", "header too large"),
  "st_no_json": (with_header(b"{nonsense}"), "is damaged"),
  "st_no_utf8": (with_header(b'{"\xff\xfe": 1}'), "is damaged"),
  "st_deep": (with_header(b'{"a":' * 100_000), "is damaged"),
  "st_empty": (with_header(b"{}"), "holds no arrays"),
  "st_escaping": (
    tampered(GOOD, data_offsets=[0, 10**9], shape=[250_000_000]),
    "file not fully covered",
  ),
  "st_negative": (tampered(GOOD, data_offsets=[-32, 0]), "is damaged"),
  "st_reversed": (tampered(GOOD, data_offsets=[32, 0]), f"invalid offset for tensor `{NAME}"),
  "st_no_range": (tampered(GOOD, data_offsets="all"), "is damaged"),
  "st_gap": (tampered(GOOD, data_offsets=[4, 32], shape=[7]), "invalid offset for tensor"),
  "st_rest": (tampered(GOOD, data_offsets=[0, 28], shape=[7]), "file not fully covered"),
  "st_shape": (tampered(GOOD, shape=[4, 3]), "invalid shape, data type, or offset"),
  "st_bad_shape": (tampered(GOOD, shape=[-4, -2]), "is damaged"),
  "st_text_shape": (tampered(GOOD, shape="42"), "is damaged"),
  "st_dtype": (tampered(GOOD, dtype="I32"), "holds int32, not floating-point numbers"),
  "st_no_numpy_dtype": (tampered(GOOD, dtype="F8_E4M3", shape=[8, 4]), "is damaged"),
  "st_odd_dtype": (tampered(GOOD, dtype=["F32"]), "is damaged"),
  "st_overlap": (TWO.replace(b"[32, 64]", b"[16, 48]"), "invalid offset for tensor `b`"),
  "st_twice": (TWO.replace(b'"b"', b'"a"'), "invalid offset for tensor `a`"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_one_line(tmp_path, name):
  content, message = REFUSED[name]
  path = tmp_path / "weights.npz"
  path.write_bytes(content)
  with pytest.raises(UserError, match=message) as caught:
    pretrained.read(str(path))
  assert str(path) in str(caught.value)
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
  "spoiled, message",
  [
    ({"head/kernel": np.float32(1)}, "head/kernel of shape"),
    ({"head/kernel": np.ones(3)}, "head/kernel of shape"),
    ({"stem/kernel": np.float32(1)}, "stem/kernel of shape"),
    ({NAME: np.ones(16)}, "Dense_0/kernel of shape"),
    ({f"MixerBlock_{'9' * 5000}/x": np.ones(1)}, "is no name of an array"),
    ({f"MixerBlock_{'9' * 100}/x": np.ones(1)}, "left over are MixerBlock_999"),
    ({f"x{i}": np.ones(1) for i in range(500)}, "left over are x0, .* and 480 more"),
  ],
)
@pytest.mark.first(3)
def test_arrays_that_no_model_has(tmp_path, spoiled, message):
  model = FAMILIES["mixer"]()
  params = traverse_util.flatten_dict(random_params(model), sep="/")
  (tmp_path / "weights").write_bytes(npz(**params | spoiled))
  with pytest.raises(UserError, match=message) as caught:
    weights = pretrained.read(str(tmp_path / "weights"))
    assert min(weights.num_classes, weights.num_tokens, weights.patch_size) >= 0
    weights.model_fields(64, "block_diagonal")
    weights.fit(shapes(model))
  assert "\n" not in str(caught.value) and len(str(caught.value)) < 2000


def torch_file(state):
  torch = pytest.importorskip("torch")
  file = io.BytesIO()
  torch.save({name: torch.tensor(array) for name, array in state.items()}, file)
  return file.getvalue()


def test_a_flipped_bit_in_a_pytorch_file(tmp_path):
  """PyTorch itself does not look at the archive's checksums."""
  array = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
  content = bytearray(torch_file({NAME: array}))
  content[content.find(array.tobytes()) + 5000] ^= 1
  (tmp_path / "w.pth").write_bytes(content)
  with pytest.raises(UserError, match="w.pth: is damaged.*Bad CRC-32"):
    pretrained.read(str(tmp_path / "w.pth"))


def test_pytorch_s_views_do_not_fill_the_memory(tmp_path):
  """A tensor of 40 GB that repeats one number is some bytes in a file."""
  torch = pytest.importorskip("torch")
  one = torch.ones(1)
  torch.save({NAME: one.expand(10**5, 10**5)}, tmp_path / "view.pth")
  with pytest.raises(UserError, match="would be 40000000000 bytes of 4 that are stored"):
    pretrained.read(str(tmp_path / "view.pth"))
  many = torch.ones(1000)
  torch.save({f"{NAME}{i}": many.view(1000) for i in range(100)}, tmp_path / "shared.pth")
  with pytest.raises(UserError, match="4000 bytes would become 400000"):
    pretrained.read(str(tmp_path / "shared.pth"))


def test_the_good_ones_of_the_above_are_read(tmp_path):
  for content in (GOOD_NPZ, GOOD, tampered(GOOD), archive((f"{NAME}.npy", npy(ONES)))):
    (tmp_path / "weights").write_bytes(content)
    assert list(pretrained.read(str(tmp_path / "weights")).arrays) == [NAME]


class Trap:
  def __reduce__(self):
    return exec, ("import pathlib; pathlib.Path('sprung').touch()",)


def test_nothing_in_a_file_is_run(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  trap = pickle.dumps(Trap(), protocol=2)
  object_array = io.BytesIO()
  np.lib.format.write_array_header_1_0(
    object_array, {"descr": "|O", "fortran_order": False, "shape": (1,)}
  )
  for content in (
    trap,
    archive(("archive/data.pkl", trap), ("archive/version", b"3\n")),
    archive((f"{NAME}.npy", object_array.getvalue() + trap)),
    archive((NAME, trap)),
  ):
    (tmp_path / "weights.npz").write_bytes(content)
    with pytest.raises(UserError) as caught:
      pretrained.read("weights.npz")
    assert "\n" not in str(caught.value)
  assert [p.name for p in tmp_path.iterdir()] == ["weights.npz"]


def test_names_that_point_elsewhere_write_nothing(tmp_path):
  inner = tmp_path / "a" / "b"
  inner.mkdir(parents=True)
  names = ("../evil", "/tmp/evil", "..\\..\\evil", f"{NAME}/../../evil")
  (inner / "weights.npz").write_bytes(
    archive(*((f"{name}.npy", npy(np.ones((16, 8)))) for name in (NAME, *names)))
  )
  weights = pretrained.read(str(inner / "weights.npz"))
  assert sorted(p.name for p in tmp_path.rglob("*")) == ["a", "b", "weights.npz"]
  with pytest.raises(UserError, match=r"left over are.*\.\./evil"):
    weights.fit(shapes(FAMILIES["mixer"]()))


def test_missing_files_and_folders(tmp_path):
  with pytest.raises(UserError, match="absent.npz: no such file, and no such directory of a run$"):
    pretrained.read(str(tmp_path / "absent.npz"))
  with pytest.raises(UserError, match="is no file"):
    pretrained.read(str(tmp_path))
  with pytest.raises(UserError, match="no such file.*google/imagenet21k/Mixer-B_16"):
    pretrained.read("google/imagenet21k/Mixer-B16")
