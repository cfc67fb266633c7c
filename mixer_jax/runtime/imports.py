"""Heavy libraries that others import where they are installed, kept out."""

import contextlib
import importlib.abc
import importlib.machinery
import sys
from typing import Iterator


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
