"""Entries of the cache that are left unfinished."""

import os
import pathlib
import subprocess
import sys

import numpy as np

from mixer_jax.data import cache

KILLED = """
import os, pathlib, sys
from mixer_jax.data import cache

def build(allocate):
  allocate("x", (1000,), "float32")
  os.kill(os.getpid(), 9)

cache.read(pathlib.Path(sys.argv[1]), "set", "key", build)
"""


def _unfinished(folder: pathlib.Path) -> list[pathlib.Path]:
  return list(folder.glob(".building-*"))


def build(allocate):
  array = allocate("x", (3,), "float32")
  array[:] = 1
  return {"x": array}


def test_what_a_killed_program_left_is_removed(tmp_path):
  for _ in range(2):
    assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)]).returncode == -9
  left = _unfinished(tmp_path)
  assert len(left) == 2  # too young, for all that the second program knew
  os.utime(left[0], (0, 0))
  np.testing.assert_array_equal(cache.read(tmp_path, "set", "key", build)["x"], [1, 1, 1])
  assert _unfinished(tmp_path) == [left[1]]
