"""Compiled programs are found again, and compute the same."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from mixer_jax import checkpoint, compilation
from mixer_jax.errors import UserError

ROOT = pathlib.Path(__file__).parent.parent
# The command, and then how many programs were found and how many were not.
SCRIPT = """
import collections, sys
import tests.conftest
import jax
counts = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: counts.update([event]))
from mixer_jax import cli, main
try:
  cli.run(main.main)
finally:
  print([counts[f"/jax/compilation_cache/cache_{kind}"] for kind in ("hits", "misses")])
"""


def test_a_second_start_finds_all_programs_and_ends_the_same(tiny_config, tmp_path):
  tiny_config.num_epochs = 1
  (tmp_path / "config.json").write_text(tiny_config.to_json())
  (tmp_path / "config.py").write_text(
    "import json, ml_collections\n"
    f"get_config = lambda: ml_collections.ConfigDict(json.load(open({str(tmp_path)!r}"
    ' + "/config.json")))\n'
  )
  cache, counts, params = tmp_path / "compiled", [], []
  for name in ("first", "second"):
    arguments = {"config": tmp_path / "config.py", "workdir": tmp_path / name}
    arguments["compilation_cache"] = cache
    result = subprocess.run(
      [sys.executable, "-c", SCRIPT, *(f"--{k}={v}" for k, v in arguments.items())],
      cwd=ROOT,
      env=os.environ | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"},
      capture_output=True,
      text=True,
      timeout=300,
    )
    assert result.returncode == 0, result.stderr
    counts.append(json.loads(result.stdout.splitlines()[-1]))
    files = {path: path.stat().st_size for path in cache.glob("*-cache")}
    saved = checkpoint.Checkpoints(tmp_path / name, read_only=True)
    params.append(saved.restore_arrays(saved.latest()))
    if name == "first":
      kept = files
  (_, compiled), (found, compiled_again) = counts
  assert len(kept) == compiled > 5 and files == kept
  assert compiled_again == 0 and found >= compiled
  jax.tree.map(np.testing.assert_array_equal, *params)


@pytest.fixture
def kept_in():
  """Where JAX keeps programs; as before after the test."""
  before = jax.config.jax_compilation_cache_dir
  jax.config.update("jax_compilation_cache_dir", None)
  yield lambda: jax.config.jax_compilation_cache_dir
  jax.config.update("jax_compilation_cache_dir", before)


def test_an_accelerator_keeps_programs_and_a_cpu_does_not(kept_in, monkeypatch, tmp_path, capsys):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  compilation.keep_in(None)
  assert kept_in() is None
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  compilation.keep_in("")
  assert kept_in() is None
  compilation.keep_in(None)
  assert kept_in() == str(tmp_path / "mixer_jax" / "compiled") and os.path.isdir(kept_in())
  jax.config.update("jax_compilation_cache_dir", "/of/the/environment")
  compilation.keep_in(None)
  assert kept_in() == "/of/the/environment"
  jax.config.update("jax_compilation_cache_dir", None)
  monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")  # a run must not fail for it
  compilation.keep_in(None)
  assert kept_in() is None and "/proc/none" in capsys.readouterr().err


def test_a_directory_asked_for_has_to_be_usable(kept_in):
  with pytest.raises(UserError, match=r"^--compilation_cache=/proc/none cannot be made: No such"):
    compilation.keep_in("/proc/none")
  assert kept_in() is None
