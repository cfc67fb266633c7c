"""Solutions that nets are compared with, computed once and kept in the cache."""

from typing import Any, Callable

import numpy as np

from mixer_jax.data import cache

_VERSION = 1  # of the cached solutions: another number makes them anew


def cached(
  name: str, identity: Any, make: Callable[[], dict[str, np.ndarray]], cache_dir: str = ""
) -> dict[str, np.ndarray]:
  """The arrays that `make` gives, from the cache if they are in it.

  Args:
    name: of the entry.
    identity: all that the arrays depend on; its `repr` counts.
    make: computes them.
    cache_dir: "" is the user's own.
  """

  def build(allocate):
    made = make()
    arrays = {name: allocate(name, x.shape, x.dtype) for name, x in made.items()}
    for name, x in made.items():
      arrays[name][...] = x
    return arrays

  key = cache.fingerprint((_VERSION, name, identity), [])
  found = cache.read(cache.place(cache_dir) / "pde", f"reference_{name}", key, build)
  return {name: np.array(x) for name, x in found.items()}
