"""Some hundred mutated files in every run of the tests; many more by `-m slow`."""

import pickle
import resource
import warnings

import numpy as np
import pytest

from mixer_jax.errors import UserError
from tests import fuzz


def faults(cases, seed, directory):
  results = fuzz.run(cases, seed, directory)
  assert sum(counts.total() for counts in results.values()) == cases
  # Every kind of file is sometimes read and sometimes refused.
  for name, counts in results.items():
    assert counts["refused"] and (cases < 5_000 or counts["read"]), name
  return {outcome for counts in results.values() for outcome in counts} - {"read", "refused"}


def test_mutated_files_are_read_or_refused(tmp_path):
  assert faults(600, 7, tmp_path) == set()


@pytest.mark.slow
def test_twenty_thousand_mutated_files(tmp_path):
  seed = int(np.random.default_rng().integers(2**31))
  print(f"seed {seed}, files in {tmp_path}")
  assert faults(20_000, seed, tmp_path) == set()


def loop():
  while True:
    pass


def hidden_loop():
  try:
    loop()
  except Exception as e:
    raise UserError("w.npz: is damaged") from e


def raising(error):
  raise error


@pytest.mark.parametrize(
  "read, outcome",
  [
    (lambda: None, "read"),
    (lambda: raising(UserError("w.npz: is damaged")), "refused"),
    (lambda: raising(UserError("two\nlines")), "fault: the message is 'two\\nlines'"),
    (lambda: raising(IndexError("tuple")), "fault: IndexError: tuple"),
    (lambda: raising(SystemExit(0)), "fault: SystemExit"),
    (lambda: warnings.warn("odd", stacklevel=1), "fault: the warning UserWarning: odd"),
    (loop, "fault: Fault: more than 0.2 s of computing"),
    (hidden_loop, "fault: Fault: more than 0.2 s of computing"),
  ],
)
def test_the_fuzzer_tells_faults_from_outcomes(read, outcome, monkeypatch):
  monkeypatch.setattr(fuzz, "_SECONDS", 0.2)
  assert fuzz.judge(read, 1e9).startswith(outcome)


def test_the_fuzzer_sees_memory(monkeypatch):
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
  monkeypatch.setattr(fuzz, "_MEGABYTES", 100)
  assert fuzz.judge(lambda: None, peak) == "read"
  assert fuzz.judge(lambda: np.ones(2**28, np.uint8).sum(), peak - 1).startswith("fault")


def test_the_fuzzer_finds_a_reader_that_unpickles(tmp_path, monkeypatch):
  """A reader that trusts its file is found out within a few cases."""
  content = pickle.dumps({"a": np.ones(50)})
  trusting = fuzz.Seed(content, lambda path, outer: pickle.loads(path.read_bytes()))
  monkeypatch.setattr(fuzz, "seeds", lambda: {"pickle": trusting})
  assert any(o.startswith("fault") for o in fuzz.run(50, 0, tmp_path)["pickle"])
  assert list(tmp_path.glob("*-pickle"))
