"""What the tests of tasks share: variables that are not zero, and runs that are killed."""

import jax
import numpy as np

from tests import children


def shaken(variables, scale=0.1, seed=0):
  """Variables plus normal noise: no head, bias or norm is at its start."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda x: x + scale * rng.normal(size=x.shape).astype(np.float32), variables)


def assert_kill_changes_nothing(config, path, *steps, whole=None, before_resume=lambda: None):
  """A run that is stopped in a step ends with the bits of `whole`, by default trained here too."""
  if whole is None:
    children.trained(config, whole := path / "whole")
  stopped = children.Child(config, path / "parts", children.signal_at, steps)
  assert stopped.wait() == 143, stopped.err
  before_resume()
  children.trained(config, path / "parts")
  children.assert_same_run(config, whole, path / "parts")
