"""Steps of our operator beside the published code: the candidate of ours, and the command's table."""

import json
import types

import pytest

from benchmarks import operator_peers


def options(**fields):
  given = dict(models=None, batch_size=4, dtype="float32", points=[512, 1024], rounds=2)
  return types.SimpleNamespace(**given | dict(published=None, torch_python=None) | fields)


@pytest.mark.thorough
def test_ours_are_steps_of_the_library():
  told = json.loads(json.dumps(operator_peers._shared("galerkin", 128, options())))
  assert told["parameters"] == 530_305  # as the published example has
  calls = operator_peers.ours(types.SimpleNamespace(**told))
  calls["step"]()
  # Parameters, Adam's two moments, and more.
  assert calls["memory"]()["bytes"] > 3 * 4 * told["parameters"]


def test_the_table_is_that_of_the_seconds(answer, monkeypatch, capsys, tmp_path):
  """Of batches of 4 of 1,024 functions."""
  seconds = {"ours": 0.5, "published": 1.0}
  answer(
    lambda name, shared, call: (
      {"bytes": 3 * 2**20} if call == "memory" else shared["points"] / 1024 * seconds[name]
    )
  )
  shared = lambda kind, points, options: dict(points=points, batch_size=4)
  monkeypatch.setattr(operator_peers, "_shared", shared)
  (tmp_path / "libs").mkdir()
  (tmp_path / "libs" / "model.py").touch()
  operator_peers.main(options(published=str(tmp_path)))
  lines = capsys.readouterr().out.splitlines()
  assert "| galerkin | ours | 512 | 0.2500 | 64.0 | 1.00 | 3 |" in lines
  assert lines[-1] == "| fourier | published | 1,024 | 1.0000 | 256.0 | 2.00 | - |"
