"""TensorFlow is never imported, even where it is installed."""

import contextlib
import importlib.abc
import importlib.machinery
import sys


class _TensorflowRefuser(importlib.abc.MetaPathFinder, importlib.abc.Loader):
  """An import hook that lets a library ask whether TensorFlow exists, but not import it."""

  def find_spec(self, name, path=None, target=None):
    del path, target
    return importlib.machinery.ModuleSpec(name, self) if name == "tensorflow" else None

  def create_module(self, spec):
    raise ModuleNotFoundError("this needs TensorFlow, which mixer_jax does not use", name=spec.name)

  def exec_module(self, module):
    raise AssertionError("create_module has already refused")


@contextlib.contextmanager
def without_tensorflow():
  """Makes `import tensorflow` fail inside: libraries use it where it is installed.

  It would cost seconds, take memory of the GPU, and change what TFDS reads with.
  """
  refuser = _TensorflowRefuser()
  sys.meta_path.insert(0, refuser)
  try:
    yield
  finally:
    sys.meta_path.remove(refuser)
