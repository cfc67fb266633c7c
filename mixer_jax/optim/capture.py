"""Statistics of layers from one forward and one backward pass of any Linen model.

Each layer's parameters get companions: zeros of the shapes of its statistics, in the same
tree. An interceptor ties them to the layer's output by a custom derivative: the gradient
with respect to a companion is the sum of the statistic over the layer's rows. Whatever a
model does with its parameters (`nn.scan`, `nn.remat`, `nn.vmap`, `jit`, a layer used twice)
it does with their companions, and JAX's own rules of differentiation stack, slice and add.
"""

import contextlib
import functools
import inspect
import itertools
from typing import Any, Callable, Iterator, Mapping, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from mixer_jax.optim import layer_views, row_sums
from mixer_jax.optim.curvature_blocks import path_name

# The name of the companions, beside those of a layer's parameters.
_COMPANION = "_curvature"
_SERIAL = itertools.count()
Path = tuple[Any, ...]
# What makes another array of a parameter; slices, casts and shardings are made of companions, too.
_ARITHMETIC = frozenset(
  "add sub mul div neg max min clamp select_n dot_general exp tanh sqrt rsqrt pow integer_pow sign"
  " round custom_jvp_call custom_vjp_call".split()
)


class Call(NamedTuple):
  """A call of a layer, as the first trace finds it.

  Attributes:
    path: of the layer's parameters in the whole tree.
    layer: the name of its class.
    view: see `layer_views.view`.
    stacked: leading axes that `nn.scan` or `nn.vmap` takes off its parameters.
    shapes: of its own parameters inside, by name.
    rows: leading shape of its rows; () of a layer without.
    mapped: whether `jax.vmap` has taken the batch axis off its rows.
    kind: "use", or "head" for an embedding's transposed use.
    changed: whether the model takes a function of its parameters, as `nn.WeightNorm` does.
    place: see `places`.
  """

  path: Path
  layer: str
  view: layer_views.View
  stacked: tuple[int, ...]
  shapes: dict[str, tuple[int, ...]]
  rows: tuple[int, ...]
  mapped: bool
  kind: str
  changed: bool
  place: str = ""


def calls(predict: Callable, params: Any, batch: Any) -> list[Call]:
  """Every call of a layer with parameters of the tree `params`, from one abstract trace.

  Raises:
    ValueError: parameters that are scanned over another axis than the first, or a model that
      does not take companions beside its parameters.
  """
  nodes = dict(_nodes(params))
  paths, serial = list(nodes), next(_SERIAL)
  # A companion's shape survives every transformation and says which node it belongs to. The
  # serial number keeps `jit` from answering with a trace that it has in its cache. NumPy's
  # arrays, since JAX would compile a program for each of these shapes.
  markers = {
    path: np.zeros((*_largest(own).shape, i, serial, 0), np.float32)
    for i, (path, own) in enumerate(nodes.items())
  }
  found = []

  def note(view, module, companion, args, y):
    *inside, i, of, _ = companion.shape
    if of != serial:
      return y
    path, own = paths[i], layer_views.own_params(module)
    shapes = {name: x.shape for name, x in own.items() if name != _COMPANION}
    if tuple(inside) != _largest(own).shape:
      where = "/".join(map(str, path))
      raise layer_views.LayerError(f"{where} is scanned over another axis than the first")
    whole = _largest(nodes[path]).shape
    stacked = whole[: len(whole) - len(inside)]
    rows = ()
    if isinstance(view, layer_views.Dense):
      rows = jax.eval_shape(view.inputs, args[0]).shape[: None if view.ids else -1]
    elif isinstance(view, layer_views.ScaleAndShift):
      rows = args[0].shape
    kind = "head" if getattr(view, "transposed", False) else "use"
    mapped = _is_mapped(args[0], stacked)
    changed = any(_is_changed(own[name]) for name in shapes)
    name = type(module).__name__
    found.append(Call(path, name, view, stacked, shapes, rows, mapped, kind, changed))
    return y

  try:
    with _intercepted(note):
      jax.eval_shape(lambda p, b: predict(_with(p, markers), b), params, batch)
  except layer_views.LayerError:
    raise
  except Exception as e:  # of whatever kind: it comes from the user's function
    reason = " ".join(str(e).split())  # in one line; JAX's have several
    raise ValueError(
      "K-FAC hands predict a tree of parameters with arrays of its own beside them, and predict"
      f" fails ({type(e).__name__}: {reason}); it must give the tree to apply as it is"
    ) from e
  return found


def sums(
  predict: Callable, params: Any, companions: Mapping[Path, Any], batch: Any
) -> tuple[Any, Any, Callable[[Any], dict[Path, Any]]]:
  """Runs the model once, forward.

  Args:
    predict: maps (params, batch) to (outputs, aux).
    companions: zeros by layer path, of `companion`'s structure.

  Returns:
    The outputs, the aux, and a function from the gradient of the outputs to the sums of all
    statistics (`companion`'s structure).
  """

  def outputs(companions):
    with _intercepted(_tie):
      return predict(_with(params, companions), batch)

  y, pullback, aux = jax.vjp(outputs, dict(companions), has_aux=True)
  return y, aux, lambda gradient: pullback(gradient)[0]


def companion(shapes: Mapping[str, tuple[int, ...]], stacked: tuple[int, ...]) -> dict[str, Any]:
  """Zeros for one layer; `shapes` of "inputs" and "outputs" of a dense one, or "scale", "bias"."""
  shapes = dict(shapes, rows=())
  return {name: jnp.zeros((*stacked, *shape), jnp.float32) for name, shape in shapes.items()}


def _is_changed(x: Any) -> bool:
  """Whether a parameter inside a layer is the result of arithmetic, as far as JAX tells it."""
  equation = getattr(x, "parent", None)
  return getattr(getattr(equation, "primitive", None), "name", None) in _ARITHMETIC


def _is_mapped(x: Any, stacked: tuple[int, ...]) -> bool:
  """Whether `jax.vmap` maps x over an axis other than those of the members of `nn.vmap`."""
  sizes = []
  while type(x).__name__ == "BatchTracer":
    sizes.append(x.val.shape[x.batch_dim])
    x = x.val
  for n in stacked:
    if n in sizes:
      sizes.remove(n)
  return bool(sizes)


@contextlib.contextmanager
def _intercepted(react: Callable) -> Iterator[None]:
  """Calls `react(view, module, companion, args, y)` at layers that have a companion."""

  def interceptor(next_call, args, kwargs, context):
    y = next_call(*args, **kwargs)
    module = context.module
    if context.method_name == "setup" or module.scope is None or module.is_initializing():
      return y
    own = module.variables.get("params", {})
    if _COMPANION not in own:
      return y
    bound = inspect.signature(context.orig_method.func).bind(module, *args, **kwargs)
    args, kwargs = bound.args[1:], bound.kwargs  # an argument with a place stands there
    view = layer_views.view(context, args, kwargs)
    return y if view is None else react(view, module, own[_COMPANION], args, y)

  with nn.intercept_methods(interceptor):
    yield


def _tie(view: layer_views.View, module: nn.Module, companion: Any, args: tuple, y: Any) -> Any:
  """The output of a layer, whose gradient also goes to the layer's companion."""
  kind = "head" if getattr(view, "transposed", False) else "use"
  if kind not in companion:
    return y
  own = companion[kind]
  if own["rows"].dtype != jnp.float32:
    raise ValueError(
      f"the parameters of {'/'.join(module.path)} are cast to {own['rows'].dtype} inside"
      " predict; leave them float32 and give the layers a dtype"
    )
  if isinstance(view, layer_views.ScaleAndShift):
    return _tied(row_sums.squares_of_sums, view.inputs(), y, own)
  statistics = lambda x, dy, own: row_sums.second_moments(view, x, dy, own)
  return _tied(statistics, args[0], y, own)


def _tied(statistics: Callable, x: jax.Array, y: jax.Array, own: Any) -> jax.Array:
  @jax.custom_vjp
  def tie(x, y, own):
    return y

  def forward(x, y, own):
    return y, (x, own)

  def backward(residuals, dy):
    x, own = residuals
    # A sum that does not depend on dy would not be one over the examples of `jax.vmap`.
    one = jnp.where(dy.ravel()[:1].sum() == 0, 1.0, 1.0)
    sums = {name: one * s for name, s in statistics(x, dy, own).items()}
    return None, dy, jax.tree.map(jnp.zeros_like, own) | sums

  tie.defvjp(forward, backward)
  return tie(x, y, dict(own))


def _nodes(tree: Any, path: Path = ()) -> Iterator[tuple[Path, dict[str, Any]]]:
  """The dictionaries of a tree that hold arrays, with these arrays."""
  children = _children(tree)
  arrays = {k: x for k, x in children.items() if hasattr(x, "shape")}
  if arrays and isinstance(tree, Mapping):
    yield path, arrays
  for key, child in children.items():
    yield from _nodes(child, (*path, key))


def _children(tree: Any) -> dict[Any, Any]:
  if isinstance(tree, Mapping):
    return dict(tree)
  return dict(enumerate(tree)) if isinstance(tree, list | tuple) else {}


def _with(tree: Any, companions: Mapping[Path, Any], path: Path = ()) -> Any:
  """The tree with companions beside the parameters of their paths."""
  if not (children := _children(tree)):
    return tree
  new = {key: _with(child, companions, (*path, key)) for key, child in children.items()}
  if not isinstance(tree, Mapping):
    values = list(new.values())
    return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
  if path in companions:
    new[_COMPANION] = companions[path]
  return type(tree)(new)


def _largest(own: Mapping[str, Any]) -> Any:
  """The array of most axes; equal ones by name."""
  arrays = {name: x for name, x in own.items() if name != _COMPANION and hasattr(x, "shape")}
  return arrays[max(sorted(arrays), key=lambda name: len(arrays[name].shape))]


def depends(
  predict: Callable, params: Any, batch: Any, chosen: Callable[[str], bool], held: set[Path]
) -> bool:
  """Whether outputs depend on parameters of the `chosen` names but through the layers `held`."""
  nodes = dict(_nodes(params))
  markers = {path: np.zeros((*_largest(nodes[path]).shape, 0), np.float32) for path in held}
  found = []

  @jax.custom_jvp
  def probe(y):
    return y

  @functools.partial(probe.defjvp, symbolic_zeros=True)
  def _(primals, tangents):
    found.append(not isinstance(tangents[0], jax.custom_derivatives.SymbolicZero))
    return primals[0], jnp.zeros_like(primals[0])

  leaves, structure = jax.tree_util.tree_flatten_with_path(params)
  names = [path_name(path) for path, _ in leaves]
  arrays = [x for _, x in leaves]
  picked = [i for i, name in enumerate(names) if chosen(name)]

  def outputs(some, arrays, batch):
    arrays = list(arrays)
    for i, x in zip(picked, some):
      arrays[i] = x
    with _intercepted(_hold):
      y = predict(_with(structure.unflatten(arrays), markers), batch)
    return jax.tree.map(probe, y)

  def derivative(arrays, batch):
    some = [arrays[i] for i in picked]
    return jax.jvp(lambda s: outputs(s, arrays, batch), (some,), (some,))

  jax.eval_shape(derivative, arrays, batch)
  return any(found)


def _hold(view: layer_views.View, module: nn.Module, companion: Any, args: tuple, y: Any) -> Any:
  """The output of a layer, of its argument alone for every derivative."""
  if isinstance(view, layer_views.Plain):
    return y
  x = args[0]
  through = 0 * x.sum() if jnp.issubdtype(x.dtype, jnp.floating) else 0
  return jax.lax.stop_gradient(y) + jnp.asarray(through, y.dtype)
