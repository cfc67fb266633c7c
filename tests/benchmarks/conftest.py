"""A run of one block, and stand-ins for the processes of peers."""

import pytest

from benchmarks import peers
from mixer_jax import experiment


@pytest.fixture
def tiny_run(tiny_config):
  tiny_config.steps_per_dispatch = 2
  tiny_config.model.num_blocks = 1
  return experiment.build(tiny_config)


@pytest.fixture
def answer(monkeypatch):
  """Lets a function of (candidate, shared options, call) answer for the workers."""

  def install(function):
    class Worker:
      def __init__(self, name, python, shared, module):
        self._given = name, shared

      def __call__(self, call):
        return function(*self._given, call)

      def close(self):
        pass

    monkeypatch.setattr(peers, "Worker", Worker)
    monkeypatch.setattr(peers, "has", lambda *_: True)

  return install
