"""From the sums that a backward pass collects to the factors of each layer."""

import math
from typing import Any, NamedTuple, Sequence

import jax
import jax.numpy as jnp

from mixer_jax.optim import capture, companions, layer_calls, layer_views, places
from mixer_jax.optim.curvature_blocks import Diagonal, Diagonals, Kronecker
from mixer_jax.optim.curvature_options import matches

# Sums, and companions that are no sums, which do not depend on the labels.
_OF_INPUTS = frozenset({"rows", "weights", "examples", "mapped", "basis"})


class Layer(NamedTuple):
  """A layer with curvature: its calls and the shapes of their statistics.

  Attributes:
    calls: all uses, of the same parameters.
    names: of its parameters in the whole tree.
    sums: shapes of the statistics of a use, see `capture.companion`.
    stacked: leading axes of the parameters.
  """

  calls: tuple[layer_calls.Call, ...]
  names: tuple[str, ...]
  sums: dict[str, tuple[int, ...]]
  stacked: tuple[int, ...]

  @property
  def call(self) -> layer_calls.Call:
    return self.calls[0]

  @property
  def block(self) -> str:
    return companions.joined(self.call.path) or self.names[0]

  @property
  def example_places(self) -> set[str]:
    """Where its uses have the examples, see `places`."""
    ran = [call for call in self.calls if call.runs]  # some bodies of loops are traced twice
    return {call.place for call in ran or self.calls}

  @property
  def shared(self) -> bool:
    """Whether every example uses all of its rows."""
    return self.example_places == {places.NOWHERE}

  def tokens(self, examples: int) -> float:
    """Rows of one of so many examples; less than one in a layer of a part of them."""
    of_stack = lambda call: math.prod(call.stacked) if call.sliced else 1
    rows = sum(math.prod(c.rows) * c.runs / of_stack(c) for c in self.calls)
    return rows / (1 if self.shared else examples)

  def companions(self, weights: jax.Array | None, basis: Any, examples: int) -> dict[str, Any]:
    """Zeros for `capture.sums`; with the basis of EK-FAC's second moments, if there is one."""
    own = capture.companion(self.sums, self.stacked)
    in_front = self.example_places <= {places.FIRST, places.FLAT}
    if self.example_places & {places.MAPPED, places.SEVERAL}:
      own["mapped"] = jnp.zeros((*self.stacked, 0), jnp.float32)
    if weights is not None and isinstance(self.call.view, layer_views.Dense) and not self.shared:
      weights = weights if in_front else weights.max()
      own["weights"] = jnp.broadcast_to(weights, (*self.stacked, *weights.shape))
    if basis is not None:
      if not in_front and self.example_places not in ({places.MAPPED}, {places.NOWHERE}):
        raise ValueError(
          f'eigenvalues="examples" needs the examples first in the rows of {self.block}; allowed:'
          ' rows [batch, ...], or eigenvalues="batch"'
        )
      apart = examples if in_front else 1
      sizes = [side.values.shape[-1] for side in basis]
      own["squares"] = jnp.zeros((*self.stacked, *sizes), jnp.float32)
      own["examples"] = jnp.zeros((*self.stacked, apart, 0), jnp.float32)
      own["basis"] = {
        side: eigen.vectors
        for side, eigen in zip(("inputs", "outputs"), basis)
        if eigen.vectors is not None
      }
    return {kind: own for kind in {call.kind for call in self.calls}}

  def scale(self, tokens: Any) -> Any:
    """The factor by which "published" multiplies the product of "expand"."""
    return 1.0 if self.call.view.patches else tokens

  def squares(self, sums: Any, examples: jax.Array, published: bool) -> jax.Array:
    """Second moments of the gradients of examples, [..., d_in, d_out], from sums of squares.

    `examples` is their number, of a shared layer the number of devices.
    """
    total = 0.0
    for own in sums.values():
      rows = jnp.maximum(own["rows"], 1.0)
      tokens = rows / jnp.maximum(examples, 1.0)
      scale = self.scale(tokens[..., None, None]) if published else 1.0
      total = total + own["squares"] * scale  # a mean: `root_weights` scale the gradients
    return total

  def factors(self, sums: Any, examples: jax.Array, published: bool) -> Kronecker | Diagonal:
    """Means from the sums over rows; `examples` as for `squares`."""
    if isinstance(self.call.view, layer_views.ScaleAndShift):
      return Diagonal(tuple(sums["use"][name] for name in ("scale", "bias") if name in self.sums))
    pairs = [self._pair(sums[kind], kind, examples, published) for kind in sorted(sums)]
    inputs, outputs = pairs[0] if len(pairs) == 1 else _mixed(pairs, self.sums)
    wrap = lambda x, side: Diagonals(x) if len(self.sums[side]) == 1 else x
    return Kronecker(wrap(inputs, "inputs"), wrap(outputs, "outputs"))

  def _pair(self, sums, kind, examples, published):
    rows = jnp.maximum(sums["rows"], 1.0)
    tokens = rows / jnp.maximum(examples, 1.0)
    acts, grads = ("outputs", "inputs") if kind == "head" else ("inputs", "outputs")
    spread = lambda x, side: x.reshape(*x.shape, *(1,) * len(self.sums[side]))
    a = sums[acts] / spread(rows, acts)
    g = sums[grads]
    if published:
      g = g * spread(tokens, grads)
      a = a / spread(tokens, acts) if self.call.view.patches else a
    return (g, a) if kind == "head" else (a, g)


def _mixed(pairs: list[tuple[Any, Any]], shapes: dict[str, tuple[int, ...]]) -> tuple[Any, Any]:
  """One Kronecker product for a sum of several, of an embedding that is also the head.

  The factors of each, of trace 1, are mixed in the proportion of the traces t of the products,
  and their product has the trace sum t.
  """
  trace = lambda x, side: x.sum(-1) if len(shapes[side]) == 1 else jnp.trace(x, axis1=-2, axis2=-1)
  tiny = jnp.finfo(jnp.float32).tiny
  whole = [trace(a, "inputs") * trace(g, "outputs") for a, g in pairs]
  total = sum(whole)
  sides = []
  for i, side in enumerate(("inputs", "outputs")):
    spread = lambda x, side=side: x.reshape(*x.shape, *(1,) * len(shapes[side]))
    unit = [pair[i] / spread(jnp.maximum(trace(pair[i], side), tiny)) for pair in pairs]
    mix = sum(spread(t / jnp.maximum(total, tiny)) * x for t, x in zip(whole, unit))
    sides.append(mix * spread(jnp.sqrt(total)))
  return tuple(sides)


def layers_of(
  calls: Sequence[layer_calls.Call],
  plain: Sequence[str],
  norms: str,
  max_factor: int,
  full_factors: Sequence[str],
) -> dict[companions.Path, Layer]:
  """The layers that get a Kronecker product or a diagonal, by path."""
  by_path: dict[companions.Path, list[layer_calls.Call]] = {}
  for call in calls:
    by_path.setdefault(call.path, []).append(call)
  found = {}
  for path, own in by_path.items():
    view, shapes = own[0].view, own[0].shapes
    if any(isinstance(call.view, layer_views.Plain) for call in own):
      continue
    own_names = dict.fromkeys(name for call in own for name in _parameters(call.view))
    names = tuple(companions.joined(path, name) for name in own_names)
    listed = [name for name in names if matches(plain, name)]
    scales = all(isinstance(call.view, layer_views.ScaleAndShift) for call in own)
    unseen = scales and norms == "gradient"
    if unseen or len(listed) == len(names):
      continue
    if why := _mistake(own, names, listed):
      raise ValueError(why)
    uncut = any(matches(full_factors, name) for name in names)
    sums = _sums_of(view, shapes, math.inf if uncut else max_factor)
    found[path] = layer = Layer(tuple(own), names, sums, own[0].stacked)
    if isinstance(view, layer_views.ScaleAndShift):
      _check_norm(layer)
  return found


def _mistake(calls: Sequence[layer_calls.Call], names: Sequence[str], listed: list[str]) -> str:
  """The reason why the parameters of a layer have no block, some of them `listed` as plain; or ""."""
  full = ", ".join(names)
  empty = {name: shape for call in calls for name, shape in call.shapes.items() if 0 in shape}
  if empty:
    name, shape = next(iter(empty.items()))
    return (
      f"{companions.joined(calls[0].path, name)} has shape {tuple(shape)}, no elements; list {full}"
      " in `plain`, or leave the layer out"
    )
  if len({(type(call.view), getattr(call.view, "kernel", None)) for call in calls}) > 1:
    return (
      f"layers of several kinds share the scope of {full} (nn.share_scope), which K-FAC cannot tell"
      " apart; list them in `plain` to train them without curvature"
    )
  if len({_parameters(call.view) for call in calls}) > 1:
    return (
      f"calls of the layer of {full} take different ones of them; list them in `plain` to train them"
      " without curvature"
    )
  if listed:
    return (
      f"plain has {', '.join(listed)} of a layer whose parameters have one block: {full}; allowed:"
      " all of them, or none"
    )
  if any(call.changed for call in calls):
    return (
      f"the model changes {full} before their layer takes them, which K-FAC cannot see; list them"
      " in `plain` to train them without curvature"
    )
  if any(call.differentiated for call in calls):
    return (
      f"predict itself takes a derivative through the layer of {full}, which K-FAC cannot see;"
      " allowed: derivatives taken before, as a part of the batch, or these listed in `plain`"
    )
  views = [call.view for call in calls if isinstance(call.view, layer_views.Dense)]
  if len({(view.axes, view.inputs_rank) for view in views}) > 1:
    return (
      f"the model multiplies over one and over other axes of {names[0]}; list {full} in `plain` to"
      " train them without curvature"
    )
  return ""


def _check_norm(layer: Layer) -> None:
  if layer.example_places not in ({places.FIRST}, {places.MAPPED}):
    shape = ", ".join(str(call.rows) for call in layer.calls)
    raise ValueError(
      f'norms="diagonal" needs the examples first in the input of {layer.block}, which has shape'
      f' {shape}; allowed: [batch, ...], or norms="gradient"'
    )


def _parameters(view) -> tuple[str, ...]:
  if isinstance(view, layer_views.ScaleAndShift):
    return tuple(name for name in (view.scale, view.bias) if name)
  return (view.kernel, view.bias) if view.bias else (view.kernel,)


def _sums_of(view, shapes, max_factor: float) -> dict[str, tuple[int, ...]]:
  """Shapes of a layer's statistics; a factor above max_factor rows is diagonal."""
  if isinstance(view, layer_views.ScaleAndShift):
    return {n: shapes[own] for n, own in (("scale", view.scale), ("bias", view.bias)) if own}
  kernel = [shapes[view.kernel][i] for i in view.axes or range(len(shapes[view.kernel]))]
  rank = len(kernel) - 1 if view.inputs_rank is None else view.inputs_rank
  d_in, d_out = math.prod(kernel[:rank]) + bool(view.bias), math.prod(kernel[rank:])
  words = view.kernel == "embedding"
  square = lambda d, wide: (d,) if wide or d > max_factor else (d, d)
  return {"inputs": square(d_in, words), "outputs": square(d_out, False)}


def inputs_once(once: Any, total: Any) -> Any:
  """The sums of one layer: those of inputs from one pass, those of gradients from all."""
  merged = {}
  for kind, sums in total.items():
    fixed = _OF_INPUTS | {"outputs" if kind == "head" else "inputs"}
    merged[kind] = {name: once[kind][name] if name in fixed else x for name, x in sums.items()}
  return merged
