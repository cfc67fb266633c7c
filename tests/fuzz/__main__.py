"""Mutates small valid files and watches their readers.

  python -m tests.fuzz [--cases=20000] [--seed=0] [--save=DIR]

A case may be read, or refused with one line. Anything else is a fault: another exception, a
warning, two minutes, 1.7 GB of memory. Its file is kept in DIR. Half of the mutations are made
inside the containers, with their checksums mended, so that they reach the readers behind them.
"""

import argparse
import collections
import pathlib
import resource
import signal
import sys
from typing import Callable
import warnings

import numpy as np

from mixer_jax.errors import UserError
from tests.fuzz.files import Fault, seeds
from tests.fuzz.mutations import mutate

_SECONDS = 120  # images of 89 million pixels take 1 s, and are decoded 4 times
_MEGABYTES = 1700  # more than before the first case: an image of 89 million pixels takes 1.4 GB


def _too_long(number, frame):
  raise Fault(f"more than {_SECONDS} s")


def peak() -> float:
  """Largest memory of the process so far, in MB."""
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def judge(read: Callable[[], None], started_with: float) -> str:
  """The outcome of a case: "read", "refused", or the fault in a line."""
  with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    signal.alarm(_SECONDS)
    try:
      read()
      outcome = "read"
    except UserError as e:
      line = str(e)
      bad = len(line) > 2000 or not line.isprintable()
      outcome = f"fault: the message is {line[:200]!r}" if bad else "refused"
    except KeyboardInterrupt:
      raise
    except BaseException as e:  # a fault of any kind
      outcome = f"fault: {type(e).__name__}: {' '.join(str(e).split())[:200]}"
    finally:
      signal.alarm(0)
  if said and not outcome.startswith("fault"):
    outcome = f"fault: the warning {said[0].category.__name__}: {said[0].message}"
  if peak() - started_with > _MEGABYTES:
    outcome = f"fault: {peak() - started_with:.0f} MB of memory"
  return outcome


def run(cases: int, seed: int, save: pathlib.Path) -> dict[str, collections.Counter]:
  """Tries cases of all kinds in turn; returns outcomes by kind and prints new faults.

  Args:
    cases: how many.
    seed: of the mutations; a case depends on it, its number and its kind's file.
    save: where files that show a fault are kept.
  """
  files, results = seeds(), collections.defaultdict(collections.Counter)
  path, known = save / "case", set()
  save.mkdir(parents=True, exist_ok=True)
  for name, file in files.items():  # the seeds themselves are read; this warms up, too
    path.write_bytes(file.content)
    if (outcome := judge(lambda file=file: file.read(path, True), 1e9)) != "read":
      raise ValueError(f"the file {name} is not good to begin with: {outcome}")
  started_with = peak()
  for number in range(cases):
    name = list(files)[number % len(files)]
    file, rng = files[name], np.random.default_rng((seed, number))
    outer = file.inside is None or bool(rng.integers(2))
    path.write_bytes(mutate(rng, file.content) if outer else file.inside(rng, file.content))
    outcome = judge(lambda: file.read(path, outer), started_with)
    results[name][outcome] += 1
    if outcome.startswith("fault"):
      path.replace(save / f"{number}-{name.replace(' ', '_')}")
      started_with = max(started_with, peak() - _MEGABYTES)
      if outcome not in known:
        known.add(outcome)
        print(f"case {number}, {name}: {outcome}", flush=True)
  path.unlink(missing_ok=True)
  return results


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--cases", type=int, default=20_000)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--save", type=pathlib.Path, default=pathlib.Path("fuzz-cases"))
  options = parser.parse_args()
  signal.signal(signal.SIGALRM, _too_long)
  total = collections.Counter()
  print("| file | cases | read | refused | faults |\n| --- | --: | --: | --: | --: |")
  for name, counts in run(options.cases, options.seed, options.save).items():
    known = counts["read"], counts["refused"]
    total["faults"] += (faults := counts.total() - sum(known))
    print(f"| {name} | {counts.total()} | {' | '.join(map(str, known))} | {faults} |")
  print(f"{options.cases} cases, {total['faults']} faults, {peak():.0f} MB")
  sys.exit(total["faults"] > 0)


if __name__ == "__main__":
  main()
