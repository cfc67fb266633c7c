"""Compiled programs are found again, and compute the same."""

import collections
import json
import os

import jax
import pytest

from mixer_jax.errors import UserError
from mixer_jax.runtime import compilation
from mixer_jax.training import loop
from tests import children
from tests.conftest import waves


def count_programs(path, cache):
  """In a child: how many programs were found, and how many were not, is written at its end."""
  counts = collections.Counter()
  jax.monitoring.register_event_listener(lambda event, **_: counts.update([event]))
  train = loop.train
  compilation.keep_in(str(cache))

  def train_and_count(*args):
    train(*args)
    kinds = ("hits", "misses")
    path.write_text(json.dumps([counts[f"/jax/compilation_cache/cache_{k}"] for k in kinds]))

  loop.train = train_and_count


@pytest.mark.thorough
def test_a_second_start_finds_all_programs_and_ends_the_same(tmp_path):
  config, cache, counts = waves("adam"), tmp_path / "compiled", []
  for name in ("first", "second"):
    file = tmp_path / f"{name}.json"
    children.trained(config, tmp_path / name, count_programs, (file, cache))
    counts.append(json.loads(file.read_text()))
    files = {path: path.stat().st_size for path in cache.glob("*-cache")}
    if name == "first":
      kept = files
  (_, compiled), (found, compiled_again) = counts
  assert len(kept) == compiled > 5 and files == kept
  assert compiled_again == 0 and found >= compiled
  children.assert_same_run(config, tmp_path / "first", tmp_path / "second")


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
