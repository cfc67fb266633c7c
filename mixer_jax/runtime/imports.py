"""Keeps out heavy libraries that other libraries import if they are installed; names that JAX moved."""

import contextlib
import importlib.abc
import importlib.machinery
import sys
from typing import Iterator

# Names that kfac-jax 0.0.8 uses.
_MOVED = ("DebugInfo", "Effects", "no_effects")


class _Refuser(importlib.abc.MetaPathFinder, importlib.abc.Loader):
  """Lets a library ask whether some modules exist, but not import them."""

  def __init__(self, names: tuple[str, ...]):
    self._names = names

  def find_spec(self, name, *_):
    return importlib.machinery.ModuleSpec(name, self) if name in self._names else None

  def create_module(self, spec):
    text = f"this needs {spec.name}, which mixer_jax does not use"
    raise ModuleNotFoundError(text, name=spec.name)

  def exec_module(self, module):
    raise AssertionError("create_module has already refused")


@contextlib.contextmanager
def without(*names: str) -> Iterator[None]:
  """Makes the first import of these top-level modules fail inside.

  TFDS and TensorFlow Probability import "tensorflow", and tensorboardX imports "torch", where
  they are installed: it costs seconds, takes memory of the GPU, and TFDS reads in other ways.
  """
  refuser = _Refuser(names)
  sys.meta_path.insert(0, refuser)
  try:
    yield
  finally:
    sys.meta_path.remove(refuser)


@contextlib.contextmanager
def moved_names() -> Iterator[None]:
  """Inside, `jax.core` has names that JAX 0.11 moved to `jax.extend.core`.

  kfac-jax reads them where it is imported, and where one of its tags is traced.
  """
  import jax.core  # late: rooms without JAX use `without`
  import jax.extend.core

  found = {name: getattr(jax.extend.core, name, None) for name in _MOVED}
  added = {k: v for k, v in found.items() if v is not None and k not in vars(jax.core)}
  vars(jax.core).update(added)
  try:
    yield
  finally:
    for name in added:
      delattr(jax.core, name)
