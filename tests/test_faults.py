"""What a run survives: signals, kills, damaged checkpoints, a second process."""

import json
import os
import shutil
import signal
import time

import pytest

from mixer_jax import checkpoint, evaluate, lock, manifest, train, workdir
from mixer_jax import config as config_lib
from mixer_jax.errors import UserError
from tests.children import Child, assert_same_run, rows, signal_at, trained


def copy_after_three(to):
  """In a child: keeps what a kill after the third epoch would leave."""
  save = checkpoint.Checkpoints.save

  def save_and_copy(self, step, *args, **kwargs):
    save(self, step, *args, **kwargs)
    self.wait()
    if step == 24:
      shutil.copytree(self.path.parent, to)

  checkpoint.Checkpoints.save = save_and_copy


@pytest.fixture
def grafted(tiny_config):
  """Three epochs of eight steps, in windows of two."""
  sides = (
    config_lib.optimizer("sgd", learning_rate=0.1),
    config_lib.optimizer("adam", learning_rate=1e-2),
  )
  tiny_config.optimizer = config_lib.grafted(*sides)
  tiny_config.num_epochs, tiny_config.steps_per_dispatch = 3, 2
  return tiny_config


def test_signals_end_a_run_between_steps_with_a_checkpoint(grafted, tmp_path):
  """Windows 1-3 of an epoch ask; the first process ends in epoch 2, the next in 3."""
  whole, parts = tmp_path / "whole", tmp_path / "parts"
  trained(grafted, whole)
  for name, code, at, step in (("SIGTERM", 143, 5, 8 + 4), ("SIGINT", 130, 2, 16 + 2)):
    ended = Child(grafted, parts, signal_at, (at, signal.Signals[name]))
    assert ended.wait() == code, ended.err
    assert f"{name}: stopping with a checkpoint; a second ends at once" in ended.err
    assert f"stopped by {name}; the checkpoint of step {step} is written" in ended.out
    assert "Traceback" not in ended.err
    assert checkpoint.Checkpoints(parts, read_only=True).latest() == step
  trained(grafted, parts)
  assert_same_run(grafted, parts, whole)
  assert evaluate.evaluate(str(parts), "best")["top1"] == rows(whole)[-1]["test/best_top1"]


def test_kfac_goes_on_between_two_inverses(tiny_config, tmp_path):
  """Inverses are renewed before steps 1, 5, 9, 13, ...; a signal comes after step 11."""
  options = dict(learning_rate=0.05, factor_period=2, inverse_period=4, factor_decay=0.5)
  tiny_config.optimizer = config_lib.optimizer("kfac", **options)
  tiny_config.model.num_blocks = 1
  whole, parts = tmp_path / "whole", tmp_path / "parts"
  trained(tiny_config, whole)
  ended = Child(tiny_config, parts, signal_at, (7 + 3,))
  assert ended.wait() == 143, ended.err
  assert checkpoint.Checkpoints(parts, read_only=True).latest() == 11
  trained(tiny_config, parts)
  assert_same_run(tiny_config, parts, whole)


@pytest.mark.parametrize("cut_in, goes_on_in", [(1, 4), (4, 1)])
def test_an_epoch_goes_on_in_other_windows(cut_in, goes_on_in, grafted, tmp_path):
  """As between a CPU and an accelerator: the same steps up to rounding."""
  whole, parts = tmp_path / "whole", tmp_path / "parts"
  grafted.num_epochs, grafted.steps_per_dispatch = 2, cut_in
  trained(grafted, whole)
  at = {1: 7 + 3, 4: 1 + 1}[cut_in]
  ended = Child(grafted, parts, signal_at, (at,))
  assert ended.wait() == 143, ended.err
  assert checkpoint.Checkpoints(parts, read_only=True).latest() == 8 + {1: 3, 4: 4}[cut_in]
  grafted.steps_per_dispatch = goes_on_in
  trained(grafted, parts)
  for x, y in zip(rows(whole), rows(parts), strict=True):
    assert x == pytest.approx(y, rel=1e-3, abs=1e-3)


def test_a_second_signal_ends_at_once(grafted, tmp_path):
  ended = Child(grafted, tmp_path / "run", signal_at, (2, signal.SIGINT, 2))
  assert ended.wait() == 130
  assert "stopped by" not in ended.out
  assert not list((tmp_path / "run" / "checkpoints").glob("[0-9]*"))


def test_signals_mean_what_they_meant_afterwards(tiny_config, tmp_path):
  tiny_config.num_epochs, tiny_config.model.num_blocks = 1, 0
  before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
  train.train(tiny_config, str(tmp_path))
  assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before
  assert signal.set_wakeup_fd(-1) == -1


def test_a_second_process_is_refused_while_the_first_lives(tiny_config, tmp_path):
  """And not once it was killed; evaluation of the live run is allowed."""
  path = tmp_path / "run"
  tiny_config.num_epochs = 10_000
  first = Child(tiny_config, path)
  try:
    deadline = time.monotonic() + 60
    while len(workdir.read_metrics(path)) < 3 and time.monotonic() < deadline:
      time.sleep(0.05)
    with pytest.raises(UserError, match=f"workdir {path} is in use: another process"):
      train.train(tiny_config, str(path))
    for _ in range(5):  # the steps that are kept move on meanwhile
      try:
        assert 0 <= evaluate.evaluate(str(path), "best")["top1"] <= 1
        break
      except UserError as e:
        print(e)
    else:
      pytest.fail("a live run could not be evaluated")
  finally:
    first.kill()
  assert not lock.held(path)
  reached = checkpoint.Checkpoints(path, read_only=True).latest() // 8
  tiny_config.num_epochs = reached + 1
  stored = json.loads((path / "config.json").read_text()) | {"num_epochs": reached + 1}
  (path / "config.json").write_text(json.dumps(stored))
  trained(tiny_config, path)
  assert [row["epoch"] for row in rows(path)] == list(range(1, reached + 2))


def test_a_lock_is_inherited_by_its_number(tmp_path, monkeypatch):
  held = lock.hold(tmp_path)
  assert lock.hold(tmp_path) is None
  monkeypatch.setenv(lock.INHERITED, str(held))
  again = lock.hold(tmp_path)
  assert again is not None
  os.close(again)
  assert lock.held(tmp_path)
  other = tmp_path / "other"
  other.mkdir()
  (other / "lock").touch()
  assert lock.hold(other) not in (None, held)  # the number is that of another directory
  os.close(held)
  assert not lock.held(tmp_path)


def largest(directory):
  files = [p for p in directory.rglob("*") if p.is_file()]
  return max(files, key=lambda p: p.stat().st_size)


def truncate(step):
  path = largest(step / "params")
  os.truncate(path, path.stat().st_size // 2)
  return path


def remove(step):
  path = largest(step / "state")
  path.unlink()
  return path


def flip(step):
  path = largest(step / "params")
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


@pytest.fixture(scope="module")
def four_epochs(shapes_npz, tmp_path_factory):
  """A run of four epochs, its config, and a copy of it after three, at step 24."""
  path, config = tmp_path_factory.mktemp("faults"), tiny(shapes_npz)
  trained(config, path / "whole", copy_after_three, (path / "three",))
  return config, path / "whole", path / "three"


def tiny(shapes_npz):
  config = config_lib.default()
  config.num_epochs, config.batch_size, config.eval_batch_size = 4, 32, 32
  config.mesh.data = 1
  config.model = config_lib.model(
    "mixer_small", hidden_dim=16, num_blocks=1, tokens_mlp_dim=8, channels_mlp_dim=32
  )
  config.data = config_lib.data("npz")
  config.data.update(dir=str(shapes_npz), image_size=8, pad=1, flip=False)
  config.optimizer = config_lib.optimizer("adam", learning_rate=3e-3)
  return config


@pytest.fixture
def copied(four_epochs, tmp_path):
  """That run as it stood after three epochs: its checkpoints of steps 16 and 24."""
  config, whole, three = four_epochs
  path = tmp_path / "run"
  shutil.copytree(three, path)
  return config, path, whole


@pytest.mark.parametrize(
  "spoil", [truncate, remove, flip, empty_metadata, forget_sums, spoil_metrics]
)
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


def test_without_a_sound_checkpoint_it_refuses(copied):
  config, path, _ = copied
  flip(path / "checkpoints" / "24")
  flip(path / "checkpoints" / "16")
  for _ in range(2):  # and does not start afresh the second time
    with pytest.raises(UserError, match="checkpoints/16 is damaged .*no other is sound"):
      train.train(config, str(path))


def test_evaluation_refuses_a_damaged_checkpoint(copied):
  _, path, _ = copied
  spoiled = flip(path / "checkpoints" / "24")
  with pytest.raises(UserError, match=f"24 is damaged .*{spoiled.name} is not as it was.*: 16$"):
    evaluate.evaluate(str(path), "24")
  assert evaluate.evaluate(str(path), "16")["top1"] >= 0


@pytest.mark.parametrize("version", [2, 3])
def test_checkpoints_of_earlier_versions_are_read(version, copied):
  """Format 2 had no sums, both knew neither steps skipped nor restores."""
  config, path, whole = copied
  for step in ("16", "24"):
    directory = path / "checkpoints" / step
    progress = directory / "progress" / "metadata"
    old = json.loads(progress.read_text()) | {"format": version}
    del old["skipped"], old["restores"]
    progress.write_text(json.dumps(old))
    (directory / "sha256.json").unlink()
    if version == 3:
      manifest.write(directory)
  trained(config, path)
  assert_same_run(config, path, whole)
