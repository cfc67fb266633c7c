"""Arrays beside the parameters of each layer, by which a layer is known inside of the model."""

import collections
import dataclasses
from typing import Any, Iterator, Mapping

# The name of these arrays among a layer's parameters, see `capture`.
COMPANION = "_curvature"
Path = tuple[Any, ...]


def joined(path: Path, *names: str) -> str:
  """ "stem/kernel": a path, and maybe a name below it, as users see it."""
  return "/".join(map(str, (*path, *names)))


def nodes(tree: Any, path: Path = ()) -> Iterator[tuple[Path, dict[str, Any]]]:
  """The dictionaries of a tree that hold arrays, with these arrays."""
  children = _children(tree)
  arrays = {k: x for k, x in children.items() if hasattr(x, "shape")}
  if arrays and isinstance(tree, Mapping):
    yield path, arrays
  for key, child in children.items():
    yield from nodes(child, (*path, key))


def _children(tree: Any) -> dict[Any, Any]:
  if isinstance(tree, Mapping):
    return dict(tree)
  if hasattr(tree, "_fields"):  # a NamedTuple
    return tree._asdict()
  if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
    return {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree)}
  return dict(enumerate(tree)) if isinstance(tree, list | tuple) else {}


def with_companions(tree: Any, companions: Mapping[Path, Any], path: Path = ()) -> Any:
  """The tree with companions beside the parameters of their paths."""
  if not (children := _children(tree)):
    return tree
  new = {key: with_companions(child, companions, (*path, key)) for key, child in children.items()}
  if dataclasses.is_dataclass(tree):
    return dataclasses.replace(tree, **new)
  if not isinstance(tree, Mapping):
    values = list(new.values())
    return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
  if path in companions:
    new[COMPANION] = companions[path]
  if isinstance(tree, collections.defaultdict):
    return collections.defaultdict(tree.default_factory, new)
  return type(tree)(new)


def largest(own: Mapping[str, Any]) -> Any:
  """The array of most axes; equal ones by name."""
  arrays = {name: x for name, x in own.items() if name != COMPANION and hasattr(x, "shape")}
  return arrays[max(sorted(arrays), key=lambda name: len(arrays[name].shape))]
