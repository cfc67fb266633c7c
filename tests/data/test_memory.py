"""The memory of a process that feeds training."""

import os
import pathlib
import subprocess
import sys

import numpy as np

ROOT = pathlib.Path(__file__).parents[2]
HUNDRED_BATCHES = """
import itertools, sys
from benchmarks import steps
from mixer_jax import config as config_lib
from mixer_jax import experiment

config = config_lib.default()
config.batch_size = 64
config.data = config_lib.data("npz", like="cifar10")
config.data.dir, config.mesh.data = sys.argv[1], 1
run = experiment.build(config)
made = [batch["image"].shape for batch in itertools.islice(steps.batches(run), 100)]
assert made == [(64, 32, 32, 3)] * 100, made
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(int(status["VmHWM"].split()[0]) / 2**20)  # GiB, the most since the process began
"""


def test_a_set_of_cifar_s_size_takes_less_than_two_gibibytes(tmp_path):
  rng, arrays = np.random.default_rng(0), {}
  for split, number in (("train", 50_000), ("test", 10_000)):
    arrays[f"{split}_images"] = rng.integers(0, 256, (number, 32, 32, 3), dtype=np.uint8)
    arrays[f"{split}_labels"] = np.arange(number) % 10
  path = tmp_path / "set.npz"
  np.savez(path, **arrays)
  command = [sys.executable, "-c", HUNDRED_BATCHES, str(path)]
  environment = os.environ | {"PYTHONPATH": str(ROOT)}
  done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  data = sum(x.nbytes for x in arrays.values()) / 2**30
  assert data < float(done.stdout) < 2
