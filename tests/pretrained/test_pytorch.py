"""PyTorch's files, by NumPy alone: which arrays are taken, and that nothing in a file is run."""

import io
import pathlib
import zipfile

import ml_dtypes
import numpy as np
import pytest

from mixer_jax import pretrained
from mixer_jax.errors import UserError
from tests.pretrained.conftest import error, run, shapes, torch_state
from tests.pretrained.pytorch_files import Global, Object, Tensor, content

BOTH = pytest.mark.parametrize("before_archives", [False, True])
SCALE = "MixerBlock_0/LayerNorm_0/scale"


def write(directory, value, before_archives=False):
  path = directory / "weights.pth"
  path.write_bytes(content(value, before_archives))
  return path


def read(directory, value, before_archives=False, **options):
  return pretrained.read(write(directory, value, before_archives), **options)


WRAPS = {
  "plain": lambda state: state,
  "deit": lambda state: {"model": state, "epoch": 299},
  "nested": lambda state: {"state_dict": {"model": state}},
  "dino": lambda state: {
    "student": {f"module.backbone.{k}": Tensor(v.array + 1) for k, v in state.items()},
    "teacher": {f"module.backbone.{k}": v for k, v in state.items()},
  },
  # A tensor beside the weights, as PyTorch's example for ImageNet has it.
  "score": lambda state: {"best_acc1": Tensor(np.float32([76.1])), "state_dict": state},
}


@BOTH
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.first(2)
def test_where_files_keep_the_state(peer, tmp_path, wrap, before_archives):
  peer = peer("deit_resmlp")
  state = {k: Tensor(v) for k, v in torch_state(peer).items()}
  state["steps"] = Tensor(np.ones(2, np.int64))  # is no weight
  weights = read(tmp_path, WRAPS[wrap](state), before_archives)
  model = peer.model(**weights.model_fields(image_size=32))
  logits, tokens = run(model, weights.fit(shapes(model)), peer.images)
  assert error(logits, peer.logits) < 1e-5
  assert error(tokens, peer.tokens) < 1e-5


@BOTH
def test_views_of_storages_and_kinds_of_numbers(tmp_path, before_archives):
  numbers = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32)
  arrays = {
    "whole": numbers,
    "part": numbers[2:5, 1::3],
    "transposed": numbers.T,
    "one": numbers[3, 4:5],
    "half": numbers.astype(np.float16),
    "double": numbers.astype(np.float64)[::2],
    "bfloat16": numbers.astype(ml_dtypes.bfloat16),
  }
  state = {f"MixerBlock_0/{k}": Tensor(v) for k, v in arrays.items()}
  found = read(tmp_path, state, before_archives).arrays
  for name, array in arrays.items():
    np.testing.assert_array_equal(found[f"MixerBlock_0/{name}"], array.astype(np.float32))
  # The four views share one storage.
  with io.BytesIO(content(state)) as file, zipfile.ZipFile(file) as archive:
    assert len(archive.namelist()) == 1 + 4


@pytest.mark.parametrize("key", ["state_dict_ema", "model_ema"])
def test_the_moving_average_is_taken_where_there_is_one(tmp_path, caplog, key):
  """As timm's `load_state_dict` takes it, unless `use_ema` is False."""
  raw = {SCALE: Tensor(np.float32([1.0, 2.0]))}
  value = {"model": raw, "state_dict": raw, key: {SCALE: Tensor(np.float32([3.0, 4.0]))}}
  with caplog.at_level("INFO"):
    assert read(tmp_path, value).arrays[SCALE].tolist() == [3.0, 4.0]
  assert key in caplog.text
  assert read(tmp_path, value, use_ema=False).arrays[SCALE].tolist() == [1.0, 2.0]
  # timm writes None where it keeps no average.
  assert read(tmp_path, value | {key: None}).arrays[SCALE].tolist() == [1.0, 2.0]


DATE = Object(Global("datetime", "datetime"), Object(Global("_codecs", "encode"), "\x07", "latin1"))
OPTIONS = {"lr": 0.1, "when": DATE, "folder": Object(Global("pathlib", "PosixPath"), "/", "a")}
BESIDE = {
  "args": Object(Global("argparse", "Namespace"), state=OPTIONS),
  DATE: "as a key",
  "counts": Object(Global("collections", "Counter"), {"a": 2}),
  "seen": Object(Global("__builtin__", "set"), [1, 2]),
  "score": Object(Global("numpy.core.multiarray", "scalar"), Global("numpy", "float64"), "x"),
  "kind": Object(Global("__builtin__", "getattr"), Global("enum", "Enum"), "name"),
  "device": Object(Global("torch", "device"), "cuda", 0),
}


@BOTH
def test_other_objects_among_the_values(tmp_path, before_archives):
  """As DINO, deit and timm save their options and whatever is in them."""
  value = {"model": {SCALE: Tensor(np.float32([1.0, 2.0]))}, **BESIDE}
  assert read(tmp_path, value, before_archives).arrays[SCALE].tolist() == [1.0, 2.0]


def test_parameters_and_derived_classes(tmp_path):
  hooks = Object(Global("collections", "OrderedDict"))
  parameter = Object(
    Global("torch._utils", "_rebuild_parameter"), Tensor(np.float32([5.0])), True, hooks
  )
  derived = Object(
    Global("torch._tensor", "_rebuild_from_type_v2"),
    Global("torch._utils", "_rebuild_tensor_v2"),
    Global("timm", "Parameter"),
    (np.float32([6.0, 7.0]), 1, (1,), (1,), False, hooks),
    {},
  )
  found = read(tmp_path, {"MixerBlock_0/a": parameter, "MixerBlock_0/b": derived}).arrays
  assert {k[-1]: v.tolist() for k, v in found.items()} == {"a": [5.0], "b": [7.0]}


CODE = "import pathlib; pathlib.Path('sprung').touch()"
TRAPS = {
  "call": Object(Global("__builtin__", "exec"), CODE),
  "import": Object(Global("importlib", "import_module"), "this"),
  "called": Object(Object(Global("__builtin__", "getattr"), Global("os", "system"), "x"), "id"),
  # The reader's own classes, to be changed by a state.
  "change": Object(
    Global("torch._utils", "_rebuild_parameter"),
    Global("torch._utils", "_rebuild_tensor_v2"),
    state=({}, {"array": Global("os", "system"), "__init__": Global("os", "system")}),
  ),
  "inert": Object(
    Global("torch._utils", "_rebuild_parameter"),
    Global("os", "system"),
    state=({}, {"__init__": Global("os", "system"), "get": Global("os", "system")}),
  ),
}


@BOTH
@pytest.mark.parametrize("trap", TRAPS)
def test_nothing_that_a_file_names_is_called(tmp_path, monkeypatch, trap, before_archives):
  monkeypatch.chdir(tmp_path)
  value = {"trap": TRAPS[trap], "model": {SCALE: Tensor(np.float32([1.0])), "trap": TRAPS[trap]}}
  for _ in range(2):  # the first one has changed nothing for the second
    assert read(tmp_path, value, before_archives).arrays[SCALE].tolist() == [1.0]
  assert [p.name for p in tmp_path.iterdir()] == ["weights.pth"]


@BOTH
@pytest.mark.parametrize(
  "offset, shape, strides",
  [(0, (4,), (1,)), (2, (2,), (1,)), (0, (2,), (3,)), (2, (2,), (-3,)), (0, (10**12,), (0,))],
)
def test_a_view_beyond_its_storage_is_refused(tmp_path, offset, shape, strides, before_archives):
  numbers = np.arange(3, dtype=np.float32)
  view = Object(
    Global("torch._utils", "_rebuild_tensor_v2"), numbers, offset, shape, strides, False, None
  )
  with pytest.raises(UserError, match="weights.pth"):
    read(tmp_path, {SCALE: view}, before_archives)


@BOTH
@pytest.mark.parametrize("kept", [0.3, 0.6, 0.9, 0.99])
def test_a_file_that_is_cut_off_is_refused(tmp_path, kept, before_archives):
  state = {SCALE: Tensor(np.ones(500, np.float32)), "b": Tensor(np.ones(500, np.float32))}
  path = pathlib.Path(write(tmp_path, state, before_archives))
  whole = path.read_bytes()
  path.write_bytes(whole[: int(kept * len(whole))])
  with pytest.raises(UserError, match="weights.pth"):
    pretrained.read(path)
