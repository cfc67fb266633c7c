"""Seconds of candidates that take turns, and bytes of compiled programs."""

import os
import statistics
import time
import types
from typing import Any, Callable, Mapping

import jax


def take_turns(
  candidates: Mapping[str, Callable[[], Any]],
  rounds: int,
  before: Mapping[str, Callable[[], Any]] = types.MappingProxyType({}),
) -> dict[str, list[float]]:
  """Seconds of each candidate in each round, run in turn after a warm-up round.

  A call of `before` precedes that of its candidate, untimed: a program gets pages of memory anew
  after others have run, which can take a third of a large model's step.
  """
  seconds = {name: [] for name in candidates}
  for i in range(rounds + 1):
    for name, call in candidates.items():
      before.get(name, lambda: None)()
      start = time.perf_counter()
      call()
      if i:
        seconds[name].append(time.perf_counter() - start)
  return seconds


def ratio(numerators: list[float], denominators: list[float]) -> float:
  """Median of ratios, taken round by round because the machine's speed drifts."""
  return statistics.median(n / d for n, d in zip(numerators, denominators, strict=True))


def peak_bytes(call: Callable[[], Any]) -> int:
  """Memory of the largest program that a first call compiles, as XLA plans it."""
  client = jax.devices()[0].client
  before = client.live_executables()  # held, so that no new one takes an old one's id
  known = {id(e) for e in before}
  call()
  plans = [e.get_compiled_memory_stats() for e in client.live_executables() if id(e) not in known]
  return max(map(planned_bytes, plans))


def planned_bytes(plan: Any) -> int:
  """Arguments, results and temporaries of a program, from `Compiled.memory_analysis()`."""
  results = plan.output_size_in_bytes - plan.alias_size_in_bytes  # without donated arguments
  return plan.argument_size_in_bytes + results + plan.temp_size_in_bytes


def fits(size: int) -> bool:
  """Whether the first device has memory of this size, less a tenth that is left to others."""
  stats = jax.devices()[0].memory_stats() or {}
  limit = stats.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  return size < 0.9 * limit
