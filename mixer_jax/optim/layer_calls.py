"""The layers that a Linen model calls, found by one abstract trace; kfac-jax is not needed."""

import contextlib
import functools
import inspect
import itertools
import logging
from typing import Any, Callable, Collection, Iterator, Mapping, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from mixer_jax.errors import reason
from mixer_jax.optim import layer_views, programs
from mixer_jax.optim.companions import COMPANION, Path, joined, largest, nodes, with_companions
from mixer_jax.optim.curvature_blocks import path_name

_SERIAL = itertools.count(1)


class Call(NamedTuple):
  """A call of a layer, as the first trace finds it.

  Attributes:
    path: of the layer's parameters in the whole tree.
    view: see `layer_views.view`; without its functions.
    stacked: leading axes that `nn.scan` or `nn.vmap` takes off its parameters.
    shapes: of its own parameters inside, by name.
    rows: leading shape of its rows, of a normalisation with their channels; () of a layer without.
    mapped: whether `jax.vmap` has taken the batch axis off its rows.
    runs: how often it runs, with every copy that `jax.vmap` makes of its rows.
    kind: "use", or "head" for an embedding's transposed use.
    sliced: whether the model itself takes one layer out of the stack.
    changed: whether the model takes a function of its parameters, as `nn.WeightNorm` does.
    differentiated: whether predict itself takes a derivative through it.
    place: see `places`.
  """

  path: Path
  view: layer_views.View
  stacked: tuple[int, ...]
  shapes: dict[str, tuple[int, ...]]
  rows: tuple[int, ...]
  mapped: bool
  runs: int
  kind: str
  sliced: bool
  changed: bool
  differentiated: bool = False
  place: str = ""


def calls(predict: Callable, params: Any, batch: Any, skipped: Collection[Path] = ()) -> list[Call]:
  """Every call of a layer with parameters of the tree `params`, from one abstract trace.

  Layers of the `skipped` paths get no companion, and are not seen.

  Raises:
    ValueError: parameters that are scanned over another axis than the first, or a model that
      does not take companions beside its parameters.
  """
  held = {path: own for path, own in nodes(params) if path not in skipped}
  paths, serial, markers = _markers(held)
  found, companions, mapped, differentiated = [], [], set(), set()

  def note(view, module, companion, args, y):
    i, of = companion.shape[-3:-1]
    if of != serial:
      return y
    path, own = paths[i], layer_views.own_params(module)
    shapes = {name: x.shape for name, x in own.items() if name != COMPANION}
    read = {getattr(view, role, None) for role in ("kernel", "bias", "scale")}
    where = joined(path)
    if missing := sorted((read & shapes.keys()) - held[path].keys()):
      raise layer_views.LayerError(
        f"{where}/{missing[0]} is not among the parameters; list {where} in `plain`, or add it to them"
      )
    stacked = _stacked(path, held[path], own)
    rows = ()
    if isinstance(view, layer_views.Dense):
      rows = jax.eval_shape(view.inputs, args[0]).shape[: None if view.ids else -1]
    elif isinstance(view, layer_views.ScaleAndShift):
      rows = args[0].shape
    kind = "head" if getattr(view, "transposed", False) else "use"
    changed = type(module).param is not nn.Module.param
    changed |= any(programs.is_computed(own[name]) for name in shapes)
    number, sliced = len(found), bool(stacked and programs.is_sliced(companion))
    kept = layer_views.without_functions(view)
    found.append(Call(path, kept, stacked, shapes, rows, False, 0, kind, sliced, changed))
    companions.append(i)
    _mark(args[0], companion, serial, number, lambda: mapped.add(number))
    return _watched(y, lambda: differentiated.add(number))

  try:
    with intercepted(note):
      program = jax.make_jaxpr(_marked(predict))(params, batch, markers).jaxpr
  except layer_views.LayerError:
    raise
  except Exception as e:  # of whatever kind: it comes from the user's function
    raise ValueError(
      "K-FAC hands predict a tree of parameters with arrays of its own beside them, and predict"
      f" fails ({type(e).__name__}: {reason(e)}); it must give the tree to apply as it is, but for"
      " layers that are listed in `plain`"
    ) from e
  runs = programs.runs(program, serial, companions)
  seen = lambda i: dict(mapped=i in mapped, differentiated=i in differentiated)
  return [c._replace(runs=runs.get(i, 0), **seen(i)) for i, c in enumerate(found)]


def _markers(held: Mapping[Path, Any]) -> tuple[list[Path], int, dict[Path, Any]]:
  """The paths of layers, a number of this trace, and shapes of companions for it.

  A companion's shape survives every transformation and says which layer it belongs to. The number
  keeps `jit` from answering with a trace that it has in its cache.
  """
  serial = next(_SERIAL)
  shapes = {path: (*largest(own).shape, i, serial, 0) for i, (path, own) in enumerate(held.items())}
  floats = {path: jax.ShapeDtypeStruct(s, jnp.float32) for path, s in shapes.items()}
  return list(held), serial, floats


def _marked(predict: Callable) -> Callable:
  return lambda params, batch, markers: predict(with_companions(params, markers), batch)


def _stacked(path: Path, whole: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[int, ...]:
  """The leading axes of a layer's parameters that it does not see inside; from its companion."""
  shape, inside = largest(whole).shape, own[COMPANION].shape[:-3]
  stacked = shape[: len(shape) - len(inside)]
  if inside != largest(own).shape or stacked + inside != shape:
    where, made = joined(path) or "the layer", any(getattr(x, "parent", None) for x in own.values())
    raise layer_views.LayerError(
      f"the model cuts or reshapes parameters of {where} before their layer takes them, which K-FAC"
      f" cannot see; list {where} in `plain`"
      if made
      else f"{where} is scanned over another axis than the first"
    )
  return stacked


def stacked_axes(predict: Callable, params: Any, batch: Any) -> dict[str, int]:
  """How many leading axes of a parameter, by path, count layers of `nn.scan` or `nn.vmap`.

  Parameters without such axes are left out. Of a model that cannot be traced so all are, and a
  warning says it.
  """
  held, found = dict(nodes(params)), {}
  paths, serial, markers = _markers(held)

  def interceptor(next_call, args, kwargs, context):
    module, setup = context.module, context.method_name == "setup"
    if not setup and module.scope is not None and not module.is_initializing():
      own = layer_views.own_params(module)
      if COMPANION in own and own[COMPANION].shape[-2] == serial:
        path = paths[own[COMPANION].shape[-3]]
        found[path] = len(_stacked(path, held[path], own))
    return next_call(*args, **kwargs)

  try:
    with nn.intercept_methods(interceptor):
      jax.eval_shape(_marked(predict), params, batch, markers)
  except Exception as e:  # of whatever kind: it comes from the user's function
    told = f"{type(e).__name__}: {reason(e)}"
    logging.getLogger(__name__).warning("stacks of layers are taken for single matrices: %s", told)
    return {}
  return {
    joined(path, name): count for path, count in found.items() for name in held[path] if count
  }


def paths_of(params: Any, wanted: Callable[[str], bool]) -> list[Path]:
  """The layers whose own parameters all are `wanted`, by their paths."""
  return [path for path, own in nodes(params) if all(wanted(joined(path, x)) for x in own)]


def _mark(
  x: jax.Array, companion: jax.Array, serial: int, number: int, react: Callable[[], None]
) -> None:
  """Tags a call for `programs.runs`, and calls `react()` whenever `jax.vmap` maps x alone.

  That is x, but not the layer's parameters, now or later: a `jax.jit`, `nn.remat` or `nn.scan`
  around the layer is traced before the map of it. The members of `nn.vmap` have parameters of their
  own, whose companions are mapped with x.
  """

  @jax.custom_batching.custom_vmap
  def probe(x, companion, tag):
    return x

  @probe.def_vmap
  def _(axis_size, in_batched, x, companion, tag):
    # All operands of a `lax.cond` are mapped if its predicate is, those without examples, too.
    of_cond = in_batched[2]
    tag, companion = (tag[0], companion[0]) if of_cond else (tag, companion)
    if in_batched[0] and (of_cond or not in_batched[1]):
      react()
      tag = programs.tag(serial, number, tag.shape[2] * axis_size)
    return probe(x, companion, tag), in_batched[0]

  probe(jax.lax.stop_gradient(x), companion, programs.tag(serial, number))


def _watched(y: jax.Array, react: Callable[[], None]) -> jax.Array:
  """The same array, which calls `react()` when the traced function takes a derivative of it."""

  @jax.custom_jvp
  def probe(y):
    return y

  @functools.partial(probe.defjvp, symbolic_zeros=True)
  def _(primals, tangents):
    if not isinstance(tangents[0], jax.custom_derivatives.SymbolicZero):
      react()
    return primals[0], tangents[0]

  return probe(y)


@contextlib.contextmanager
def intercepted(react: Callable) -> Iterator[None]:
  """Calls `react(view, module, companion, args, y)` at layers that have a companion.

  Of a class that calls its base the innermost call is the layer's.
  """
  under_way = []  # [module, whether a call of its base was the layer's]

  def interceptor(next_call, args, kwargs, context):
    module = context.module
    under_way.append([module, False])
    try:
      y = next_call(*args, **kwargs)
    finally:
      _, seen = under_way.pop()
    if seen:
      return y
    if context.method_name == "setup" or module.scope is None or module.is_initializing():
      return y
    own = module.variables.get("params", {})
    if COMPANION not in own:
      return y
    bound = inspect.signature(context.orig_method.func).bind(module, *args, **kwargs)
    args, kwargs = bound.args[1:], bound.kwargs  # an argument with a place stands there
    view = layer_views.view(context, args, kwargs)
    if view is None:
      return y
    for outer in under_way:
      outer[1] |= outer[0] is module
    return react(view, module, own[COMPANION], args, y)

  with nn.intercept_methods(interceptor):
    yield


def depends(
  predict: Callable, params: Any, batch: Any, chosen: Callable[[str], bool], held: set[Path]
) -> bool:
  """Whether outputs depend on parameters of the `chosen` names but through the layers `held`."""
  own = dict(nodes(params))
  shapes = {path: (*largest(own[path]).shape, 0) for path in held}
  markers = {path: jax.ShapeDtypeStruct(s, jnp.float32) for path, s in shapes.items()}
  found = []

  leaves, structure = jax.tree_util.tree_flatten_with_path(params)
  names = [path_name(path) for path, _ in leaves]
  arrays = [x for _, x in leaves]
  picked = [i for i, name in enumerate(names) if chosen(name)]

  def outputs(some, arrays, batch, markers):
    arrays = list(arrays)
    for i, x in zip(picked, some):
      arrays[i] = x
    with intercepted(_hold):
      y = predict(with_companions(structure.unflatten(arrays), markers), batch)
    return jax.tree.map(lambda y: _watched(y, lambda: found.append(True)), y)

  def derivative(arrays, *rest):
    some = [arrays[i] for i in picked]
    return jax.jvp(lambda s: outputs(s, arrays, *rest), (some,), (some,))

  jax.eval_shape(derivative, arrays, batch, markers)
  return bool(found)


def _hold(view: layer_views.View, module: nn.Module, companion: Any, args: tuple, y: Any) -> Any:
  """The output of a layer, of its argument alone for every derivative."""
  if isinstance(view, layer_views.Plain):
    return y
  x = args[0]
  through = 0 * x.sum() if jnp.issubdtype(x.dtype, jnp.floating) else 0
  return jax.lax.stop_gradient(y) + jnp.asarray(through, y.dtype)
