"""From the programs of a function to its blocks, and to the taps that estimate them."""

import dataclasses
import math
from typing import Any, Callable, Mapping, NamedTuple, Sequence

import jax
import numpy as np

from mixer_jax.optim.curvature import layers as layers_lib
from mixer_jax.optim.curvature import patterns, program, statistics, taps
from mixer_jax.optim.curvature.blocks import Block
from mixer_jax.optim.trees import by_path, wide_type

SHIFT = "a scale or shift"


class Tap(NamedTuple):
  """What stands at a use.

  Attributes:
    block: the name of its block.
    kind: that of the use, `statistics.USE` or `TRANSPOSED`, or "elements" of a scale or shift.
    operand: number of the equation's input that holds the rows.
    rows: of a product, see `taps.Rows`.
    stacked: how many loops around take a matrix each off its stack; None: rows of several runs are
      of one matrix, or those of a branch.
    elements: of a scale or shift the statistics, see `taps.of_elements`.
  """

  block: str
  kind: str
  operand: int
  rows: taps.Rows | None = None
  stacked: int | None = None
  elements: Callable | None = None


@dataclasses.dataclass
class Traced:
  """The programs of batches of some shapes.

  Attributes:
    terms: the programs.
    layers: with a Kronecker block.
    blocks: of all parameters, in their order.
    taps: of each term, by the path of the equation.
    owners: by number of a parameter the names of the blocks whose kernel or element it is.
  """

  terms: list[program.Term]
  layers: list[statistics.Layer]
  blocks: tuple[Block, ...]
  taps: list[dict[Any, Tap]]
  owners: dict[int, list[str]]


@dataclasses.dataclass
class Choices:
  """The options that decide on blocks, see `curvature.Curvature`; `failed` are layers left out."""

  norms: str
  unpreconditioned: Sequence[str]
  max_factor: Any
  failed: frozenset[str] = frozenset()

  def left_out(self, path: str) -> str:
    """Why a parameter shall have no curvature, or ""."""
    if patterns.matches(self.unpreconditioned, path):
      return "left out by unpreconditioned"
    return "its rows do not give its gradient" if path in self.failed else ""


def build(terms: list[program.Term], params: Any, choices: Choices) -> Traced:
  """The blocks and taps of programs of parameters of these shapes."""
  return _Builder(terms, by_path(params), choices).built()


class _Builder:
  def __init__(self, terms: list[program.Term], params: Mapping[str, Any], choices: Choices):
    self.terms, self.names, self.leaves = terms, list(params), list(params.values())
    self.choices, self.counted = choices, _counted(terms)
    self.dtype = str(wide_type(self.leaves))
    self.layers, self.owners = [], {}
    self.taps: list[dict[Any, Tap]] = [{} for _ in terms]

  def built(self) -> Traced:
    found, reasons = layers_lib.combined(
      [t.found for t in self.terms], [x.size for x in self.leaves]
    )
    left_out = {i: why for i, name in enumerate(self.names) if (why := self.choices.left_out(name))}
    for name, layer in zip(layers_lib.names(found, self.names), found):
      if layer.bias is not None and (layer.kernel.leaf in left_out or layer.bias.leaf in left_out):
        reasons.setdefault(layer.bias.leaf, "its kernel is left out")
        layer.bias = None
      if layer.kernel.leaf not in left_out:
        self._add(name, layer)
    reasons |= left_out
    of_path: dict[str, list[Block]] = {name: [] for name in self.names}
    for layer in self.layers:
      for path in layer.block.paths:
        of_path[path].append(layer.block)
    for i, name in enumerate(self.names):
      of_path[name] = of_path[name] or [self._rest(i, reasons.get(i, "is not read"))]
    blocks = dict.fromkeys(block for name in self.names for block in of_path[name])
    return Traced(self.terms, self.layers, tuple(blocks), self.taps, self.owners)

  def _add(self, name: str, layer: layers_lib.Layer) -> None:
    """A layer with a Kronecker block."""
    kinds = set()
    for use, place in layer.uses:
      kind = statistics.TRANSPOSED if place.transposed else statistics.USE
      with_bias = use.bias is not None and layer.bias is not None
      rows = taps.Rows(use.product, place, with_bias, layer.sizes, self.counted)
      self.taps[use.term][use.path] = Tap(
        name, kind, use.operand, rows, use.view.stacked if use.once else None
      )
      kinds.add(kind)
    masked = bool((layer.kernel.positions < 0).any())
    self.owners.setdefault(layer.kernel.leaf, []).append(name)
    self.layers.append(
      statistics.Layer(self._block(name, layer), layer.patches, tuple(sorted(kinds)), masked)
    )

  def _block(self, name: str, layer: layers_lib.Layer) -> Block:
    views = [view for view in (layer.kernel, layer.bias) if view is not None]
    paths = tuple(self.names[view.leaf] for view in views)
    limit = patterns.limit(self.choices.max_factor, paths)
    wide = [size > limit for size in layer.sizes]
    examples = lambda use: 1 if (t := self.terms[use.term]).mapped else t.examples
    tokens = sum(use.rows / examples(use) for use, _ in layer.uses)
    return Block(
      name,
      "kronecker",
      paths,
      tuple(self.leaves[view.leaf].shape for view in views),
      layer.sizes,
      (layer.table or wide[0], wide[1]),
      layer.stacked,
      tuple(map(layers_lib.without_positions, views)),
      "embedding" if layer.table else layer.uses[0][0].kind,
      len(layer.uses),
      max(round(tokens), 1),
      dtype=self.dtype,
    )

  def _rest(self, leaf: int, reason: str) -> Block:
    """The block of a parameter without a layer."""
    name, shape = self.names[leaf], self.leaves[leaf].shape
    if self.choices.norms != "diagonal" or reason != SHIFT:
      return Block(name, "gradient", (name,), (shape,), reason=reason)
    if not all(term.mapped for term in self.terms):
      raise ValueError(
        'norms="diagonal" needs outputs that depend on one example, not in_axes=None'
      )
    own = [use for t in self.terms for use in t.found.uses if use.view.leaf == leaf]
    if not all(_is_in_front(use.view, shape) for use in own):
      return Block(
        name, "gradient", (name,), (shape,), reason=f"{SHIFT}, stacked along a later axis"
      )
    self.owners[leaf] = [name]
    for term, placed in zip(self.terms, self.taps):
      for use in term.found.uses:
        if use.product is None and use.view.leaf == leaf:
          view = layers_lib.without_positions(use.view)
          lead = shape[: use.view.stacked]
          squares = taps.of_elements(view, shape, use.kind == "scale", lead)
          placed[use.path] = Tap(name, "elements", use.operand, elements=squares)
    stacked = shape[: min(use.view.stacked for use in own)]
    return Block(name, "diagonal", (name,), (shape,), stacked=stacked, dtype=self.dtype)


def _is_in_front(view: Any, shape: tuple[int, ...]) -> bool:
  """Whether the layers that scans take off a parameter are its first axes."""
  lead = view.positions.shape[: view.stacked]
  size = math.prod(shape[view.stacked :])
  number = np.arange(math.prod(lead)).reshape(*lead, *(1,) * len(view.shape))
  own = (view.positions < 0) | (view.positions // max(size, 1) == number)
  return lead == shape[: view.stacked] and bool(own.all())


def _counted(terms: Sequence[program.Term]) -> str | None:
  """How rows are told from padding, see `taps.Rows`; None: all count."""
  answers = [term.structure.unflatten(term.program.out_avals) for term in terms]
  if all(a.weights is None and a.tokens is None for a in answers):
    return None
  weights = [w for a in answers for w in jax.tree.leaves(a.weights)]
  of_rows = any(a.tokens is not None for a in answers) or any(len(w.shape) > 1 for w in weights)
  return "reached" if of_rows or not all(term.mapped for term in terms) else "examples"
