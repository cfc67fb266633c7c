"""The command line of the fuzzer."""

import argparse
import pathlib
import sys
import time

from tests import fuzz


def main() -> None:
  parser = argparse.ArgumentParser(description=fuzz.__doc__.splitlines()[0])
  parser.add_argument("--cases", type=int, default=20_000)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--save", type=pathlib.Path, default=pathlib.Path("fuzz-cases"))
  options = parser.parse_args()
  start = time.monotonic()
  results = fuzz.run(options.cases, options.seed, options.save)
  faults = 0
  print("| file | cases | read | refused | faults |\n| --- | --: | --: | --: | --: |")
  for name, counts in results.items():
    bad = counts.total() - counts["read"] - counts["refused"]
    print(f"| {name} | {counts.total()} | {counts['read']} | {counts['refused']} | {bad} |")
    faults += bad
  cpu = time.process_time()
  print(f"{options.cases} cases, {faults} faults, {time.monotonic() - start:.0f} s ({cpu:.0f} s of computing), {fuzz.peak():.0f} MB")  # fmt: skip
  sys.exit(faults > 0)


if __name__ == "__main__":
  main()
