"""Checkpoints: damaged, removed while they are read, written on other devices."""

import json
import os
import shutil
import types

from flax import traverse_util
from flax.serialization import to_state_dict
import jax
import numpy as np
import pytest

from mixer_jax import evaluate, experiment, export, predict
from mixer_jax.errors import UserError
from mixer_jax.rundir import metrics_file
from mixer_jax.runtime import mesh as mesh_lib
from mixer_jax.training import checkpoint, loop, restore, resume
from mixer_jax.training.checkpoint import Checkpoints
from mixer_jax.training.state import init_state
from tests.children import assert_same_run, called, trained
from tests.conftest import waves


def copy_after_three(to):
  """In a child: keeps the files that a kill after the third epoch would leave."""
  save = Checkpoints.save

  def save_and_copy(self, step, *args, **kwargs):
    save(self, step, *args, **kwargs)
    self.wait()
    if step == 24:
      shutil.copytree(self.path.parent, to)

  Checkpoints.save = save_and_copy


@pytest.fixture(scope="module")
def four_epochs(tmp_path_factory):
  """A run of four epochs, its config, and a copy of it after three, at step 24."""
  path, config = tmp_path_factory.mktemp("faults"), waves("adam", num_epochs=4)
  trained(config, path / "whole", copy_after_three, (path / "three",))
  return config, path / "whole", path / "three"


@pytest.fixture
def copied(four_epochs, tmp_path):
  """That run as it stood after three epochs: its checkpoints of steps 16 and 24."""
  config, whole, three = four_epochs
  path = tmp_path / "run"
  shutil.copytree(three, path)
  return config, path, whole


def largest(directory):
  files = [p for p in directory.rglob("*") if p.is_file()]
  return max(files, key=lambda p: p.stat().st_size)


def truncate(step):
  path = largest(step / "variables")
  os.truncate(path, path.stat().st_size // 2)
  return path


def remove(step):
  path = largest(step / "rest")
  path.unlink()
  return path


def flip(step):
  path = largest(step / "variables")
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 1
  path.write_bytes(data)
  return path


def empty_metadata(step):
  path = step / "_CHECKPOINT_METADATA"
  path.write_text("")
  return path


def forget_sums(step):
  path = step / "sha256.json"
  path.unlink()
  return path


def spoil_metrics(step):
  path = step / "metrics" / "metrics"
  path.write_text("{")
  return path


@pytest.mark.parametrize(
  "spoil",
  [
    flip,
    forget_sums,
    spoil_metrics,
    *(pytest.param(f, marks=pytest.mark.slow) for f in (truncate, remove, empty_metadata)),
  ],
)
@pytest.mark.first(1)
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(spoil, copied):
  config, path, whole = copied
  spoiled = spoil(path / "checkpoints" / "24")
  resumed = trained(config, path)
  (line,) = [line for line in resumed.err.splitlines() if "damaged" in line]
  assert f"checkpoint {path}/checkpoints/24 is damaged" in line
  assert str(spoiled.relative_to(path / "checkpoints" / "24")) in line
  assert "that of step 16 is sound" in line
  assert "resumed from step 16, epoch 2" in resumed.out
  assert (path / "damaged" / "24-0").is_dir()
  assert_same_run(config, path, whole)


def test_a_damaged_checkpoint_keeps_the_name_of_none_before_it(copied):
  config, path, _ = copied
  (path / "damaged" / "24-0").mkdir(parents=True)
  (path / "damaged" / "24-2").mkdir()
  flip(path / "checkpoints" / "24")
  trained(config, path)
  assert sorted(p.name for p in (path / "damaged").iterdir()) == ["24-0", "24-1", "24-2"]


def test_without_a_sound_checkpoint_it_refuses(copied):
  config, path, _ = copied
  flip(path / "checkpoints" / "24")
  flip(path / "checkpoints" / "16")
  for _ in range(2):  # and does not start afresh the second time
    with pytest.raises(UserError, match="checkpoints/16 is damaged .*no other is sound"):
      loop.train(config, str(path))


def test_evaluation_refuses_a_damaged_checkpoint(copied):
  _, path, _ = copied
  spoiled = flip(path / "checkpoints" / "24")
  with pytest.raises(UserError, match=f"24 is damaged .*{spoiled.name} is not as it was.*: 16$"):
    evaluate.evaluate(str(path), "24")
  assert evaluate.evaluate(str(path), "16")["test"]["error"] > 0


@pytest.mark.parametrize("leftover", ["nothing", "half of it"])
def test_a_checkpoint_that_is_removed_while_it_is_read_gives_way_to_another(
  leftover, copied, monkeypatch
):
  """A live run writes a newer one, and removes the files of the one that the reader has found."""
  _, path, whole = copied
  step, found = path / "checkpoints" / "24", []
  find = Checkpoints.find

  def find_and_remove(self, which):
    found.append(find(self, which))
    if len(found) == 2:  # the first look only asks whether it exists
      shutil.copytree(whole / "checkpoints" / "32", path / "checkpoints" / "32")
      shutil.rmtree(step if leftover == "nothing" else step / "variables")
    return found[-1]

  monkeypatch.setattr(Checkpoints, "find", find_and_remove)
  restored = restore.restore(str(path), "latest")
  assert restored.step == 32 and found[1] == 24
  exported = export.export(str(path), "latest", str(path / "weights.npz"))
  kernel = restored.variables["params"]["Dense_0"]["kernel"]
  np.testing.assert_array_equal(np.load(exported)["Dense_0/kernel"], kernel)


def test_a_list_of_steps_that_cannot_be_read_is_one_line(copied):
  _, path, _ = copied
  spoil_metrics(path / "checkpoints" / "24")
  with pytest.raises(UserError, match=f"^{path}/checkpoints cannot be read: "):
    evaluate.evaluate(str(path), "16")


def test_a_step_that_is_asked_for_and_gone_is_one_line(copied):
  _, path, _ = copied
  with pytest.raises(UserError, match="checkpoint '7' is not in .*; allowed: best, latest, 16, 24"):
    evaluate.evaluate(str(path), "7")


def test_a_checkpoint_of_another_model_or_optimizer_is_refused(copied):
  """Somebody copies checkpoints/ of one run into the directory of another."""
  _, path, _ = copied
  for field, value in (("model.width", 8), ("optimizer.name", "adagrad")):
    config = waves("adam", num_epochs=4)
    config.update_from_flattened_dict({field: value, "optimizer.eps": 1e-2})
    (path / "config.json").write_text(config.to_json())
    with pytest.raises(UserError, match="checkpoint .*24 cannot be restored") as info:
      loop.train(config, str(path))
    assert "\n" not in str(info.value) and len(str(info.value)) < 2000
  with pytest.raises(UserError, match=r"24 cannot be restored: .*Dense_0.*, the model wants"):
    (path / "config.json").write_text(waves("adam", **{"model.width": 8}).to_json())
    evaluate.evaluate(str(path))


def renamed(tree):
  """The state of another format: one field has another name, one is new."""
  fields = to_state_dict(tree)
  return {"optimizer" if k == "opt_state" else k: v for k, v in fields.items()} | {
    "new": np.ones(2)
  }


def test_the_format_of_a_checkpoint_is_told_before_its_arrays_are_compared(copied, monkeypatch):
  config, path, _ = copied
  monkeypatch.setattr(checkpoint, "FORMAT", 6)
  told = f"^checkpoint {path}/checkpoints/24 is not of format 6$"
  with pytest.raises(UserError, match=told):
    restore.load_run(str(path))
  (path / "config.json").write_text(waves("adam", **{"model.width": 8}).to_json())
  with pytest.raises(UserError, match=told):
    evaluate.evaluate(str(path))
  (path / "config.json").write_text(config.to_json())
  monkeypatch.setattr(checkpoint, "serialization", types.SimpleNamespace(to_state_dict=renamed))
  with pytest.raises(UserError, match=told):
    loop.train(config, str(path))


def answers(path, data):
  """In a process: everything that is asked of a run that has ended."""
  restored = restore.restore(path)
  outputs, targets, *_ = predict.predict(restored.run, restored.variables)
  weights = dict(np.load(export.export(path, "latest", f"{data}.npz")))
  return evaluate.evaluate(path), outputs, targets, weights


def split_all():
  """In a child: all parameters can be split over the axis "model"."""
  mesh_lib._SPLIT_FROM = 1


def test_a_run_of_eight_devices_answers_on_one_and_the_reverse(tmp_path):
  """Evaluated, predicted and exported; parameters of the first run are split over 4 devices."""
  for trained_on, shape, asked_on in ((8, (2, 4), 1), (1, (-1, 1), 8)):
    path = tmp_path / f"{trained_on}"
    config = waves("adam", **{"mesh.data": shape[0], "mesh.model": shape[1]})
    trained(config, path, split_all, devices=trained_on)
    found, outputs, targets, weights = called(
      tmp_path / "asked", answers, str(path), str(tmp_path / "w"), devices=asked_on
    )
    row = metrics_file.read(path)[-1]
    assert found["test"]["error"] == pytest.approx(row["test/error"], rel=1e-5)
    run = experiment.build(waves())
    params = traverse_util.unflatten_dict(weights, sep="/")
    expected = run.task.predict({"params": params}, run.datasets["test"].tree)
    np.testing.assert_allclose(outputs, expected.outputs, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(targets, expected.targets)


@pytest.mark.thorough
def test_the_mean_of_the_latest_checkpoints(tmp_path):
  """All its variables, by commands and for another run; more checkpoints than two are kept."""
  task, path = "tests.training.collections_task:WithCollections", tmp_path / "run"
  loop.train(waves("adam", task=task, num_epochs=5, keep_checkpoints=4), path)
  kept = [restore.restore(path, str(step)).variables for step in (16, 24, 32, 40)]
  expected = [np.mean(x, axis=0, dtype=np.float64) for x in zip(*map(jax.tree.leaves, kept[-3:]))]
  run, variables, step = restore.restore(path, "mean:3")
  assert step == 40 and set(variables) == set(run.variable_shapes)
  for found in (variables, restore.stored(path, "mean:3")[1]):
    for x, mean in zip(jax.tree.leaves(found), expected, strict=True):
      np.testing.assert_allclose(x, mean, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(found["frozen"]["offset"], kept[0]["frozen"]["offset"])
  assert evaluate.evaluate(path, "mean:1") == evaluate.evaluate(path)
  for which in ("mean:5", "mean:0", "mean:-1", "mean:", "mean:2.0"):
    with pytest.raises(UserError, match=f"'{which}'; allowed: mean:1 to mean:4 in .*keep_checkp"):
      restore.restore(path, which)


def test_a_training_set_smaller_than_the_batch_is_restored(tmp_path):
  loop.train(waves(num_steps=2, eval_steps=2, checkpoint_steps=2), str(tmp_path))
  stored = json.loads((tmp_path / "config.json").read_text())
  stored["data"]["examples"], stored["batch_size"] = 64, 128
  (tmp_path / "config.json").write_text(json.dumps(stored))
  restored = restore.restore(str(tmp_path))
  assert (restored.step, restored.place) == (2, "step 2")
  assert restored.run.config.batch_size == 128
  assert evaluate.evaluate(str(tmp_path)).keys() == {"test"}


def test_names_of_checkpoints(tmp_path, caplog):
  """The best is the first of the best that were evaluated; one out of turn takes no place among the latest three."""
  state = init_state(experiment.build(waves("adam")))
  saved = Checkpoints(tmp_path, keep=3)
  for step, score in ((2, None), (4, None)):
    saved.save(step, state, 1.0, score)
  saved.wait()
  with pytest.raises(UserError, match="checkpoint 'best' is not in .*; allowed: latest, 2, 4"):
    saved.find("best")
  for step, score, regular in ((6, 3.0, True), (8, None, True), (9, 1.0, False), (12, 3.0, True)):
    saved.save(step, state, 1.0, score, regular)
  saved.close()
  caplog.clear()
  found = Checkpoints(tmp_path, read_only=True)
  assert not caplog.records  # Orbax says in every one that it is read only
  assert found.find("best") == 6 and found.find("latest") == 12
  assert found.latest_steps("3", keep=3) == [6, 8, 12]
  assert found.latest_steps("2", keep=2) == [8, 12]  # without an older best
  with pytest.raises(UserError, match="mean:4'; allowed: mean:1 to mean:3"):
    found.latest_steps("4", keep=3)
  assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["12", "6", "8"]


def test_a_resumed_run_takes_over_what_the_task_filled_in_and_nothing_else(tmp_path):
  """An option of the optimizer that is left open is its default."""
  stored, opened = waves("adam"), waves("adam")
  stored.optimizer.b1, stored.model.width = 0.5, 7
  opened.optimizer.b1, opened.model.width = 0.5, None
  given = opened.copy_and_resolve_references()
  given.optimizer.b1 = None
  resume.store(tmp_path, stored)
  resume.store_first(tmp_path, opened, stored)
  resumed = resume.taken_over(tmp_path, given)
  assert (resumed.optimizer.b1, resumed.model.width) == (None, 7)
  resume.store_first(tmp_path, stored, stored)  # the width was the user's
  assert resume.taken_over(tmp_path, given).model.width is None


def test_a_field_that_is_left_open_later_is_told(tiny_config, tmp_path):
  tiny_config.num_epochs, tiny_config.model.dropout_rate = 1, 0.5
  loop.train(tiny_config, str(tmp_path))
  tiny_config.model.dropout_rate = None
  with pytest.raises(UserError, match="model.dropout_rate was 0.5, is None"):
    loop.train(tiny_config, str(tmp_path))


@pytest.mark.parametrize("save_best", [True, False])
def test_the_best_is_saved_out_of_turn_only_if_asked_for(save_best, tmp_path):
  """A run whose error falls at every evaluation, with one checkpoint in its turn: the last."""
  config = waves("adam", num_epochs=3, checkpoint_epochs=3.0, save_best=save_best)
  steps = []
  with pytest.MonkeyPatch.context() as patch:
    save = checkpoint.Checkpoints.save
    record = lambda self, step, *rest: (steps.append(step), save(self, step, *rest))[1]
    patch.setattr(checkpoint.Checkpoints, "save", record)
    loop.train(config, tmp_path)
  rows = metrics_file.read(tmp_path)
  improved = [row["step"] for row in rows if row["test/best_step"] == row["step"]]
  assert len(improved) > 1
  assert steps == (sorted({*improved, rows[-1]["step"]}) if save_best else [rows[-1]["step"]])
  assert evaluate.evaluate(tmp_path, "best")
