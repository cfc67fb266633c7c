"""Turns and memory."""

import jax
import jax.numpy as jnp

from benchmarks import timing


def test_candidates_take_turns():
  order = []
  calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
  seconds = timing.take_turns(calls, rounds=2)
  assert order == ["a", "b"] * 3  # the first round warms up
  assert {name: len(s) for name, s in seconds.items()} == {"a": 2, "b": 2}


def test_memory_is_that_of_the_compiled_program():
  x = jnp.ones((256, 256))
  jax.block_until_ready(x)
  program = jax.jit(lambda x: jnp.tanh(x @ x) @ x)
  # The argument, the result and one intermediate of 256 KiB each, at least.
  assert 3 * x.nbytes <= timing.peak_bytes(lambda: program(x)) < 5 * x.nbytes


def test_a_call_before_a_candidate_s_is_not_timed(monkeypatch):
  clock = [0.0]
  monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
  takes = lambda seconds: lambda: clock.__setitem__(0, clock[0] + seconds)
  found = timing.take_turns({"a": takes(1), "b": takes(2)}, 2, before={"b": takes(100)})
  assert found == {"a": [1, 1], "b": [2, 2]}
