"""Answers to inputs: lines, and arrays in a file."""

import io
import json

import numpy as np
import pytest

from docs.own_task import Derivative
from mixer_jax import experiment, predict
from mixer_jax.errors import UserError
from mixer_jax.training.state import init_state
from tests.conftest import waves


class TwoOutputs(Derivative):
  """Means and variances as a tuple, and targets by name."""

  def predict(self, variables, batch):
    found = super().predict(variables, batch)
    outputs = found.outputs, found.outputs**2
    return found._replace(outputs=outputs, targets={"y": found.targets, "twice": 2 * found.targets})


def test_each_array_of_a_prediction_has_a_name(tmp_path):
  run = experiment.build(waves(task=f"{__name__}:TwoOutputs"))
  found = predict.arrays(run, init_state(run).variables)
  predict.write_arrays(found, str(tmp_path / "a.npz"))
  y = run.datasets["test"].tree["y"]
  with np.load(tmp_path / "a.npz") as kept:
    assert set(kept.files) == {"outputs/0", "outputs/1", "targets/y", "targets/twice", "weights"}
    np.testing.assert_allclose(kept["outputs/1"], kept["outputs/0"] ** 2, rtol=1e-6)
    np.testing.assert_allclose(kept["targets/twice"], 2 * y, rtol=1e-6)


def test_numbers_and_texts_of_answers_become_arrays(tmp_path):
  out = str(tmp_path / "a.npz")
  answers = [
    {"text": "a", "n": i, "share": 0.5, "values": [1.0, 2.0], "top": {"a": 1.0}, "words": [{}]}
    for i in range(3)
  ]
  predict.write_answers(answers, out)
  with np.load(out) as found:
    kinds = {name: (found[name].dtype.kind, found[name].shape) for name in found.files}
    assert found["n"].tolist() == [0, 1, 2] and found["share"].dtype == np.float32
  assert kinds == {
    "text": ("U", (3,)),
    "n": ("i", (3,)),
    "share": ("f", (3,)),
    "values": ("f", (3, 2)),
  }


def test_answers_that_are_no_arrays_are_told(tmp_path):
  with pytest.raises(UserError, match="--out takes numbers and texts; y is neither"):
    predict.write_answers([{"y": [[1.0], [1.0, 2.0]]}], str(tmp_path / "a.npz"))


def test_an_answer_is_readable_on_any_terminal():
  answer = {"class": "蓝色", "path": "caf\udce9.png"}
  assert predict.as_line(answer, "latin-1") == json.dumps(answer)
  assert predict.as_line(answer, "utf-8") == json.dumps(answer)  # a name that is no text
  assert predict.as_line({"class": "蓝色"}, "utf-8") == '{"class": "蓝色"}'
  assert predict.as_line({"class": "café"}, "latin-1") == '{"class": "café"}'


def test_answers_before_a_refused_input_are_written(tmp_path):
  def answers():
    yield {"n": 1}
    yield {"n": 2}
    raise UserError("c.jpg: broken image")

  out = tmp_path / "a.npz"
  with pytest.raises(UserError, match="c.jpg: broken image"):
    predict.write_answers(answers(), str(out))
  with np.load(out) as found:
    assert found["n"].tolist() == [1, 2]
  with pytest.raises(UserError, match="of one shape; answer 3 has"):
    predict.write_answers([{"n": 5}, {"n": 6}, {"n": [1, 2]}, {"n": 7}], str(out))
  with np.load(out) as found:
    assert found["n"].tolist() == [5, 6]


def test_a_file_is_whole_or_as_it_was(tmp_path, monkeypatch):
  out = tmp_path / "a.npz"
  predict.write_arrays({"x": np.arange(3)}, str(out))

  def full(*_, **__):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(np.lib.format, "write_array", full)
  with pytest.raises(UserError, match="a.npz: cannot be written: No space left"):
    predict.write_arrays({"x": np.arange(4)}, str(out))
  with np.load(out) as found:
    assert found["x"].tolist() == [0, 1, 2]
  assert list(tmp_path.iterdir()) == [out]


def test_lines_of_inputs_may_end_as_on_windows_and_keep_their_blanks(tmp_path, capsys, monkeypatch):
  content = "\ufeffcat.jpg \r\n\n two words\t\r\n  \na\rb\x0cc\u2028d\r\nend".encode()
  (tmp_path / "a.txt").write_bytes(content)
  expected = ["cat.jpg ", " two words\t", "a\rb\x0cc\u2028d", "end"]
  assert predict.read_lines(str(tmp_path / "a.txt")) == expected
  assert "2 of 6 lines are blank" in capsys.readouterr().err
  monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"one\ntwo\r\n")))
  assert predict.read_lines("-") == ["one", "two"] and not capsys.readouterr().err
