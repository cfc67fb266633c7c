"""What a small install lacks: the libraries of `mixer_jax[train]`.

`pip install mixer_jax` brings what models, optimizers and public weights need. Every other part of
the package, so every command, needs the extra `train` as well, and says so here, in one line.
"""

import functools
import importlib.abc
import importlib.util
import pathlib
import sys

# The parts that need no extra.
SMALL = frozenset("errors extras models npz optim options paths pretrained runtime".split())
_LARGE = {path.stem for path in pathlib.Path(__file__).parent.iterdir()} - SMALL - {"__init__"}
# Modules of libraries that the extra brings.
_TRAIN = (
  *("clu", "google_crc32c", "matplotlib", "ml_collections", "PIL", "tensorboardX"),
  *("tensorflow_datasets", "tokenizers"),
)


class _Finder(importlib.abc.MetaPathFinder):
  """Finds nothing: it only looks at which parts of this package are imported."""

  def find_spec(self, name, path=None, target=None):
    package, _, part = name.partition(".")
    part = part.partition(".")[0]
    if package == "mixer_jax" and part in _LARGE:
      _check_train(name)


def announce_missing() -> None:
  """From now on an import of a part whose libraries are not installed names the extra to install."""
  sys.meta_path.insert(0, _Finder())


def _check_train(name: str) -> None:
  if not (missing := _missing()):
    return
  text = f"{name} needs pip install 'mixer_jax[train]' (missing: {', '.join(missing)})"
  if sys.argv[:1] == ["-m"]:  # Python looks for the module of a command
    print(f"error: {text}", file=sys.stderr)
    sys.exit(2)
  raise ModuleNotFoundError(text, name=missing[0])


@functools.cache
def _missing() -> tuple[str, ...]:
  return tuple(name for name in _TRAIN if importlib.util.find_spec(name) is None)
