"""What a run survives: signals, kills, damaged checkpoints, a second process."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from mixer_jax import checkpoint, evaluate, experiment, lock, sharding, train, workdir
from mixer_jax import config as config_lib
from mixer_jax.errors import UserError

ROOT = pathlib.Path(__file__).parent.parent
TIMES = ("images_per_second", "seconds_per_epoch")

# Trains the config in a file as `mixer_jax.main` would; Python code of the test first.
CHILD = """
import json, sys
import tests.conftest
import ml_collections
from absl import flags
from mixer_jax import cli, steps, train
def main(argv):
  config = ml_collections.ConfigDict(json.load(open({config!r})))
  {before}
  train.train(config, {path!r})
sys.argv = ["train"]
cli.run(main)
"""
# Sends this process a signal after the window `at` of those it runs.
SIGNAL_AT = """
  import os, time
  class Signalled(steps.EpochTrainer):
    def __call__(self, state, epoch, part=None, stop=None):
      def asked():
        Signalled.windows += 1
        if Signalled.windows == {at}:
          for _ in range({times}):
            os.kill(os.getpid(), {number})
            time.sleep(0.2)
        return stop()
      return super().__call__(state, epoch, part, asked)
  Signalled.windows = 0
  train.EpochTrainer = Signalled
"""
# Keeps what a kill after the third epoch would leave.
COPY_AFTER_THREE = """
  import pathlib, shutil
  from mixer_jax import checkpoint
  save = checkpoint.Checkpoints.save
  def save_and_copy(self, step, *args, **kwargs):
    save(self, step, *args, **kwargs)
    self.wait()
    if step == 24:
      shutil.copytree(self.path.parent, {to!r})
  checkpoint.Checkpoints.save = save_and_copy
"""


def child(config, path, before="pass"):
  """A process that trains; its standard output and error are pipes."""
  file = path.with_suffix(".json")
  file.write_text(config.to_json())
  script = CHILD.format(config=str(file), path=str(path), before=before.strip())
  return subprocess.Popen(
    [sys.executable, "-c", script],
    cwd=ROOT,
    env=os.environ | {"TQDM_DISABLE": "1"},
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def rows(path):
  return [{k: v for k, v in row.items() if k not in TIMES} for row in workdir.read_metrics(path)]


def final_arrays(config, path):
  """Every array of the last checkpoint: parameters, optimizer, key, step."""
  run = experiment.build(config)
  saved = checkpoint.Checkpoints(path, read_only=True)
  shapes = jax.eval_shape(lambda: train.init_state(run))
  shapes = checkpoint.template(shapes, sharding.replicated(run.mesh))
  params, state, _ = saved.restore(
    saved.find("latest"), shapes.params, train._without_params(shapes)
  )
  return jax.tree.leaves((params, state))


def assert_same_run(config, a, b):
  assert rows(a) == rows(b)
  pairs = zip(final_arrays(config, a), final_arrays(config, b), strict=True)
  assert all(np.array_equal(x, y) for x, y in pairs)


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
  train.train(grafted, str(whole))
  for name, code, at, step in (("SIGTERM", 143, 5, 8 + 4), ("SIGINT", 130, 2, 16 + 2)):
    number = int(signal.Signals[name])
    ended = child(grafted, parts, SIGNAL_AT.format(at=at, times=1, number=number))
    out, err = ended.communicate(timeout=120)
    assert ended.returncode == code, err
    assert f"{name}: stopping with a checkpoint; a second ends at once" in err
    assert f"stopped by {name}; the checkpoint of step {step} is written" in out
    assert "Traceback" not in err
    assert checkpoint.Checkpoints(parts, read_only=True).latest() == step
  train.train(grafted, str(parts))
  assert_same_run(grafted, parts, whole)
  assert evaluate.evaluate(str(parts), "best")["top1"] == rows(whole)[-1]["test/best_top1"]


def test_a_second_signal_ends_at_once(grafted, tmp_path):
  ended = child(grafted, tmp_path / "run", SIGNAL_AT.format(at=2, times=2, number=2))
  out, _ = ended.communicate(timeout=120)
  assert ended.returncode == 130
  assert "stopped by" not in out
  assert not list((tmp_path / "run" / "checkpoints").glob("[0-9]*"))


def test_signals_mean_what_they_meant_afterwards(tiny_config, tmp_path):
  before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
  train.train(tiny_config, str(tmp_path))
  assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before
  assert signal.set_wakeup_fd(-1) == -1


def test_a_second_process_is_refused_while_the_first_lives(tiny_config, tmp_path):
  """And not once it was killed; evaluation of the live run is allowed."""
  path = tmp_path / "run"
  tiny_config.num_epochs = 10_000
  first = child(tiny_config, path)
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
    first.communicate()
  assert not lock.held(path)
  reached = checkpoint.Checkpoints(path, read_only=True).latest() // 8
  tiny_config.num_epochs = reached + 1
  stored = json.loads((path / "config.json").read_text()) | {"num_epochs": reached + 1}
  (path / "config.json").write_text(json.dumps(stored))
  train.train(tiny_config, str(path))
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
def trained(shapes_npz, tmp_path_factory):
  """A run of four epochs, its config, and a copy of it after three, at step 24."""
  path, config = tmp_path_factory.mktemp("faults"), tiny(shapes_npz)
  ended = child(config, path / "whole", COPY_AFTER_THREE.format(to=str(path / "three")))
  _, err = ended.communicate(timeout=120)
  assert not ended.returncode, err
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
def copied(trained, tmp_path):
  """That run as it stood after three epochs: its checkpoints of steps 16 and 24."""
  config, whole, three = trained
  path = tmp_path / "run"
  shutil.copytree(three, path)
  return config, path, whole


@pytest.mark.parametrize(
  "spoil", [truncate, remove, flip, empty_metadata, forget_sums, spoil_metrics]
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(spoil, copied, capsys):
  config, path, whole = copied
  spoiled = spoil(path / "checkpoints" / "24")
  capsys.readouterr()
  train.train(config, str(path))
  out, err = capsys.readouterr()
  (line,) = [line for line in err.splitlines() if "damaged" in line]
  assert f"checkpoint {path}/checkpoints/24 is damaged" in line
  assert str(spoiled.relative_to(path / "checkpoints" / "24")) in line
  assert "that of step 16 is sound" in line
  assert "resumed from step 16, epoch 2" in out
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


def test_checkpoints_of_the_version_before_are_read(copied):
  """Format 2 had no sums."""
  config, path, whole = copied
  for step in ("16", "24"):
    directory = path / "checkpoints" / step
    (directory / "sha256.json").unlink()
    progress = directory / "progress" / "metadata"
    progress.write_text(json.dumps(json.loads(progress.read_text()) | {"format": 2}))
  train.train(config, str(path))
  assert_same_run(config, path, whole)
