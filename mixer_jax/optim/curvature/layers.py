"""From uses of parameters to layers: which uses multiply by the same matrix, and with which bias."""

import dataclasses
from typing import Any, NamedTuple, Sequence

import numpy as np

from mixer_jax.optim.curvature.uses import Found, Use
from mixer_jax.optim.curvature.views import View


class Place(NamedTuple):
  """A use's share of its layer's matrix.

  Attributes:
    transposed: whether the use multiplies by the transpose.
    rows: which inputs of the layer the use has, or None for all.
    columns: the same of its outputs.
  """

  transposed: bool = False
  rows: np.ndarray | None = None
  columns: np.ndarray | None = None


@dataclasses.dataclass
class Layer:
  """A matrix of parameters, and the uses of it.

  Attributes:
    kernel: the view [*blocks, d_in, d_out] of the matrix; `blocks` of it are matrices of a stack.
    bias: the view [*blocks, d_out] of a bias, or None.
    uses: with the share that each has.
  """

  kernel: View
  bias: View | None
  uses: list[tuple[Use, Place]]

  @property
  def stacked(self) -> tuple[int, ...]:
    """Leading axes that count matrices: layers of a scan, heads, groups of a convolution."""
    return self.kernel.positions.shape[:-2]

  @property
  def sizes(self) -> tuple[int, int]:
    """Inputs, one more where there is a bias, and outputs."""
    d_in, d_out = self.kernel.shape[-2:]
    return d_in + (self.bias is not None), d_out

  @property
  def table(self) -> bool:
    return any(use.product.table for use, _ in self.uses)

  @property
  def patches(self) -> bool:
    return any(use.product.patches for use, _ in self.uses)


def group(found: Found, sizes: Sequence[int]) -> tuple[list[Layer], dict[int, str]]:
  """The layers of a program with parameters of these sizes, and why other leaves have none."""
  reasons, layers = dict(found.leaks), []
  by_leaf: dict[int, list[Use]] = {leaf: [] for leaf in range(len(sizes))}
  for use in found.uses:
    by_leaf[use.view.leaf].append(use)
  biases = {use.bias.leaf for use in found.uses if use.bias is not None}
  for leaf, uses in by_leaf.items():
    if leaf in reasons or (leaf in biases and not uses):
      continue
    if not uses:
      reasons[leaf] = "is not read"
    elif not sizes[leaf]:
      reasons[leaf] = "has no elements"
    elif all(use.product is None for use in uses):
      reasons[leaf] = "a scale or shift"
    elif any(use.product is None for use in uses):
      reasons[leaf] = "is also added, or a factor, outside of its product"
    elif (own := _of_leaf(uses)) is None:
      reasons[leaf] = "is read as two different matrices"
    elif not _covered(own, sizes[leaf]):
      reasons[leaf] = "is read only in part"
    else:
      layers += own
  _choose_biases(layers, by_leaf, reasons)
  return layers, reasons


def combined(terms: Sequence[Found], sizes: Sequence[int]) -> tuple[list[Layer], dict[int, str]]:
  """`group` of the programs of several terms, whose uses then know their term."""
  whole = Found()
  for i, found in enumerate(terms):
    for use in found.uses:
      use.term = i
    whole.uses += found.uses
    whole.leaks = found.leaks | whole.leaks
  return group(whole, sizes)


def names(layers: Sequence[Layer], paths: Sequence[str]) -> list[str]:
  """A name for each layer: its module's path, or the kernel's where a module has several."""
  kernels = [paths[layer.kernel.leaf] for layer in layers]
  modules = [kernel.rpartition("/")[0] or kernel for kernel in kernels]
  found = [m if modules.count(m) == 1 else k for m, k in zip(modules, kernels)]
  number = lambda i: f"[{found[:i].count(found[i])}]" if found.count(found[i]) > 1 else ""
  return [name + number(i) for i, name in enumerate(found)]


def _of_leaf(uses: Sequence[Use]) -> list[Layer] | None:
  """The layers of one parameter, or None if uses overlap without being parts of one matrix."""
  return _matched(uses, uncut=True) or _matched(uses, uncut=False)


def _covered(layers: Sequence[Layer], size: int) -> bool:
  """Whether layers have all elements of their parameter, but for those that a mask hides."""
  positions = [layer.kernel.positions for layer in layers]
  return any((p < 0).any() for p in positions) or sum(p.size for p in positions) == size


def _matched(uses: Sequence[Use], uncut: bool) -> list[Layer] | None:
  view = lambda use: (uncut and use.view.uncut) or use.view
  layers: list[Layer] = []
  # The first use of a matrix says which side is inputs: a table, or a product with a bias.
  order = lambda use: (-view(use).positions.size, not use.product.table, use.bias is None)
  for use in sorted(uses, key=order):
    for layer in layers:
      if (place := match(layer.kernel, use.view)) is not None:
        if uncut and not use.view.uncut and place.rows is not None:
          return None  # parts side by side, as of fused layers
        layer.uses.append((use, place))
        break
    else:
      matrix = view(use)
      if any(_overlap(layer.kernel, matrix) for layer in layers):
        return None
      place = match(matrix, use.view)
      if place is None:
        return None
      layers.append(Layer(matrix, None, [(use, place)]))
  return layers


def _overlap(a: View, b: View) -> bool:
  return bool(np.isin(a.positions[a.positions >= 0], b.positions).any())


def match(layer: View, use: View) -> Place | None:
  """The share that a use has of a matrix, or None if it multiplies by another one."""
  a, b = layer.positions, use.positions
  if use.uncut is not None and np.array_equal(a, use.uncut.positions):
    return Place(False, *map(np.arange, use.shape))
  if a.ndim != b.ndim or a.shape[:-2] != b.shape[:-2] or layer.stacked != use.stacked:
    return None
  if a.shape == b.shape and (a is b or np.array_equal(a, b)):
    return Place()
  swapped = b.swapaxes(-2, -1)
  if a.shape == swapped.shape and np.array_equal(a, swapped):
    return Place(transposed=True)
  for transposed, part in ((False, b), (True, swapped)):
    rows, columns = (_places(a, part, axis) for axis in (-2, -1))
    if rows is None or columns is None:
      continue
    if np.array_equal(a[..., rows[:, None], columns], part):
      return Place(transposed, rows, columns)
  return None


def _places(whole: np.ndarray, part: np.ndarray, axis: int) -> np.ndarray | None:
  """Where the slices of a part along an axis stand in the whole, by their first elements."""
  first = lambda x: x.reshape(-1, *x.shape[-2:])[0]
  found, known = first(part), first(whole)
  at = np.argwhere(known == found[0, 0])
  if len(at) != 1:
    return None
  line, wanted = (known[:, at[0, 1]], found[:, 0]) if axis == -2 else (known[at[0, 0]], found[0])
  order = np.argsort(line, kind="stable")
  places = order[np.minimum(np.searchsorted(line[order], wanted), len(line) - 1)]
  return places if np.array_equal(line[places], wanted) else None


def _choose_biases(
  layers: list[Layer], by_leaf: dict[int, list[Use]], reasons: dict[int, str]
) -> None:
  """Gives a layer the bias of its uses if they have the same one, and nothing else reads it."""
  owners: dict[int, list[int]] = {}
  for i, layer in enumerate(layers):
    for use, _ in layer.uses:
      if use.bias is not None and i not in owners.setdefault(use.bias.leaf, []):
        owners[use.bias.leaf].append(i)
  for layer in layers:
    candidates = [
      (_whole_bias(layer, use.bias), place) for use, place in layer.uses if use.bias is not None
    ]
    first = candidates[0][0] if candidates else None
    usable = (
      first is not None
      and not any(place.transposed for _, place in candidates)
      and all(b is not None and np.array_equal(b.positions, first.positions) for b, _ in candidates)
      and all(b.leaf == first.leaf for b, _ in candidates)
      and len(owners[first.leaf]) == 1
      and first.leaf not in reasons
      and not by_leaf[first.leaf]
    )
    layer.bias = first if usable else None
  with_layer = {layer.bias.leaf for layer in layers if layer.bias is not None}
  for leaf in owners.keys() - with_layer:
    reasons.setdefault(leaf, "a scale or shift")


def _whole_bias(layer: Layer, bias: View) -> View | None:
  """The bias of all outputs of a layer, where a use may have the leading part of both."""
  shape = (*layer.kernel.positions.shape[:-2], layer.kernel.shape[-1])
  if bias.positions.shape == shape:
    return bias
  if len(shape) == 1 and np.array_equal(bias.positions, np.arange(bias.shape[-1])):
    return View(bias.leaf, np.arange(shape[0], dtype=np.int32))
  return None


def without_positions(view: View | None) -> Any:
  """A view that only reads: its array of positions is as large as the parameter."""
  return None if view is None else view._replace(positions=None, uncut=None)
