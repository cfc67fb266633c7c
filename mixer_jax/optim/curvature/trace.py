"""Finds every place where a program reads a parameter: from a jaxpr to a list of uses.

The walk follows views of parameters (`views`) and outputs of products through the equations of a
program, into jit, scan, cond, remat, custom_jvp and shard_map. A reader that is no product, no
scale, no shift and no view is a leak: its parameter has no layer, and the reason is kept.
"""

import dataclasses
import math
from typing import Any, Callable

import jax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

from mixer_jax.optim.curvature import products, views
from mixer_jax.optim.curvature.views import View

Path = tuple[Any, ...]  # indices of equations, from the outermost program inwards


@dataclasses.dataclass
class Use:
  """One place of a program that reads a parameter.

  Attributes:
    path: of the equation.
    kind: "dense", "conv", "embedding", "scale" or "shift".
    view: of the parameter: for a product a matrix [*blocks, d_in, d_out], else of the shape of
      the equation's result.
    operand: which input of the equation holds the rows, or the ids; None: it has none.
    product: the arrangement of rows, see `products.Product`; None: of a scale or shift.
    bias: the view of a bias that is added to the product's outputs, [*blocks, d_out], or None.
    rows: how many rows each matrix multiplies, in all runs of the loops around.
    once: whether each matrix of a stack is multiplied in one run, outside of branches.
    term: number of the program, where there are several.
    slices: the outputs, block * d_out + i, of each slice that is taken of the result.
  """

  path: Path
  kind: str
  view: View
  operand: int | None = None
  product: products.Product | None = None
  bias: View | None = None
  rows: float = 0
  once: bool = False
  term: int = 0
  slices: list[np.ndarray] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Output:
  """The result of a product, maybe reshaped: which output, block * d_out + i, each element is."""

  use: Use
  positions: np.ndarray


@dataclasses.dataclass
class _Constant:
  """A value that depends on no argument of the program; computed on demand."""

  value: Callable[[], np.ndarray]


@dataclasses.dataclass
class Found:
  """What a walk finds.

  Attributes:
    uses: of parameters.
    leaks: by leaf, why a reader that is no use cannot be seen.
    selections: paths of equations that take one layer out of a stack.
    runs: how often the equations that the walk is at run, by the loops around them.
    branches: how many branches the walk is in.
    narrow: whether it computes in floats of 16 bits.
    debug: JAX's information about the program.
  """

  uses: list[Use] = dataclasses.field(default_factory=list)
  leaks: dict[int, str] = dataclasses.field(default_factory=dict)
  selections: set[Path] = dataclasses.field(default_factory=set)
  runs: int = 1
  branches: int = 0
  narrow: bool = False
  debug: Any = None


def find(program: core.ClosedJaxpr, leaves: dict[int, int]) -> Found:
  """Walks a program; `leaves` maps numbers of its arguments to those of parameters."""
  found = Found(debug=program.jaxpr.debug_info)
  values = [
    views.whole(leaves[i], v.aval.shape) if i in leaves else None
    for i, v in enumerate(program.jaxpr.invars)
  ]
  for value in _walk(found, program.jaxpr, program.consts, values, ()):
    _leak(found, value, "is an output of the function")
  return found


def _walk(found: Found, jaxpr: Any, consts: Any, values: list[Any], path: Path) -> list[Any]:
  """The values of a program's results; consts may be arrays, or values known outside."""
  known = lambda c: (
    c if c is None or isinstance(c, View | _Constant) else _Constant(lambda: _array(c))
  )
  environment = dict(zip(jaxpr.invars, values)) | dict(zip(jaxpr.constvars, map(known, consts)))

  def value(v):
    return _Constant(lambda: v.val) if isinstance(v, core.Literal) else environment.get(v)

  for i, equation in enumerate(jaxpr.eqns):
    given = [value(v) for v in equation.invars]
    results = _equation(found, equation, given, (*path, i))
    environment.update(zip(equation.outvars, results))
  return [value(v) for v in jaxpr.outvars]


def _equation(found: Found, equation: Any, given: list[Any], path: Path) -> list[Any]:
  """The values of an equation's results."""
  none = [None] * len(equation.outvars)
  found.narrow |= any(map(_is_narrow, equation.outvars))
  if all(isinstance(x, _Constant) for x in given) and not equation.effects:
    return _constants(equation, given, found.debug)
  if not any(isinstance(x, View | _Output) for x in given):
    return none
  name = equation.primitive.name
  if isinstance(given[0], _Output) and name in ("split", "slice"):
    _note_slices(given[0], name, equation.params)
    return none
  if name in _INNER:
    return _INNER[name](found, equation, given, path)
  if len(given) == 1 and isinstance(given[0], View):
    if (after := views.after(given[0], name, equation.params)) is not None:
      return [after]
    if name == "split":
      return views.parts(given[0], equation.params["sizes"], equation.params["axis"])
    if name == "stop_gradient":
      return none
  if name in _READERS:
    result = _READERS[name](found, equation, given, path)
    if result is not NotImplemented:
      return [result]
  for x in given:
    _leak(found, x, f"is read by {name}")
  return none


def _note_slices(output: _Output, name: str, params: dict[str, Any]) -> None:
  """Keeps which outputs each slice of a product's result has: those of fused heads."""
  whole = View(0, output.positions)
  if name == "split":
    parts = views.parts(whole, params["sizes"], params["axis"])
  else:
    parts = [views.after(whole, name, params)]
  output.use.slices += [np.unique(part.positions) for part in parts]


def _is_narrow(variable: Any) -> bool:
  dtype = getattr(variable.aval, "dtype", np.dtype(bool))
  return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits <= 16


def _leak(found: Found, value: Any, reason: str) -> None:
  if isinstance(value, View):
    found.leaks.setdefault(value.leaf, reason)


def _constants(equation: Any, given: list[_Constant], debug: Any) -> list[_Constant]:
  results = []

  def compute():
    if not results:
      arguments = [x.value() for x in given]
      with jax.ensure_compile_time_eval():
        results.extend(map(_array, evaluate(equation, arguments, debug)))
    return results

  return [_Constant(lambda i=i: compute()[i]) for i in range(len(equation.outvars))]


def _array(x: Any) -> Any:
  """A value of NumPy, with which one can calculate while a program is traced; or keys."""
  is_key = jnp.issubdtype(getattr(x, "dtype", np.dtype(bool)), jax.dtypes.extended)
  return x if is_key else np.asarray(x)


def evaluate(equation: Any, arguments: list[Any], debug: Any) -> list[Any]:
  """The results of one equation, whatever it is; `debug` is the information of its program."""
  given = {v: x for v, x in zip(equation.invars, arguments) if not isinstance(v, core.Literal)}
  jaxpr = core.Jaxpr((), tuple(given), equation.outvars, [equation], equation.effects, debug)
  return jax.core.eval_jaxpr(jaxpr, (), *given.values())


# Programs inside of programs.


def _call(key: str) -> Callable:
  def walk(found, equation, given, path):
    inner = equation.params[key]
    closed = isinstance(inner, core.ClosedJaxpr)
    jaxpr, consts = (inner.jaxpr, inner.consts) if closed else (inner, ())
    return _walk(found, jaxpr, consts, given, path)

  return walk


def _scan(found: Found, equation: Any, given: list[Any], path: Path) -> list[Any]:
  """Carried values stay views if the body hands them on as they are; xs are layers of a stack."""
  body, params = equation.params["jaxpr"], equation.params
  n, m = params["num_consts"], params["num_consts"] + params["num_carry"]
  handed_on = [
    isinstance(x, View) and body.jaxpr.outvars[i] is body.jaxpr.invars[n + i]
    for i, x in enumerate(given[n:m])
  ]
  for x, kept in zip(given[n:m], handed_on):
    if not kept:
      _leak(found, x, "changes in a loop")
  outer = lambda x: x if isinstance(x, View | _Constant) else None
  carry = [x if kept else None for x, kept in zip(given[n:m], handed_on)]
  layers = [views.stacked(x) if isinstance(x, View) else None for x in given[m:]]
  inside = [*map(outer, given[:n]), *carry, *layers]
  found.runs *= params["length"]
  results = _walk(found, body.jaxpr, body.consts, inside, path)
  found.runs //= params["length"]
  for x, kept in zip(results, [*handed_on, *[False] * len(results)]):
    if not kept:
      _leak(found, x, "is a result of a loop")
  return [*carry, *[None] * (len(equation.outvars) - len(carry))]


def _cond(found: Found, equation: Any, given: list[Any], path: Path) -> list[Any]:
  outer = [x if isinstance(x, View | _Constant) else None for x in given[1:]]
  found.branches += 1
  for b, branch in enumerate(equation.params["branches"]):
    for x in _walk(found, branch.jaxpr, branch.consts, outer, (*path, b)):
      _leak(found, x, "is a result of a branch")
  found.branches -= 1
  return [None] * len(equation.outvars)


def _shard_map(found: Found, equation: Any, given: list[Any], path: Path) -> list[Any]:
  whole = []
  for x, spec in zip(given, equation.params["in_specs"]):
    if split := any(part is not None for part in spec):
      _leak(found, x, "is split over devices by a shard_map")
    whole.append(None if split else x)
  for x in _walk(found, equation.params["jaxpr"], (), whole, path):
    _leak(found, x, "is a result of a shard_map")
  return [None] * len(equation.outvars)


def _unseen(where: str) -> Callable:
  def walk(found, equation, given, path):
    for x in given:
      _leak(found, x, f"is read in {where}, which cannot be seen")
    return [None] * len(equation.outvars)

  return walk


_INNER = {
  **dict.fromkeys(("jit", "pjit", "closed_call", "checkpoint", "remat2"), _call("jaxpr")),
  **dict.fromkeys(("core_call", "custom_jvp_call"), _call("call_jaxpr")),
  "shard_map": _shard_map,
  "scan": _scan,
  "cond": _cond,
  "while": _unseen("a while loop"),
  "custom_vjp_call": _unseen("a jax.custom_vjp"),
  "custom_vjp_call_jaxpr": _unseen("a jax.custom_vjp"),
}


# Equations that read parameters.


def _add_use(found: Found, use: Use, equation: Any) -> _Output:
  found.uses.append(use)
  shape, matrix = equation.outvars[0].aval.shape, use.view.positions.shape
  use.rows = math.prod(shape) / max(math.prod((*matrix[:-2], matrix[-1])), 1) * found.runs
  stack = math.prod(matrix[: use.view.stacked])
  # Which layer an index takes out of a stack is not known here: it may take one twice.
  use.once = found.runs == stack and not found.branches and not found.selections
  return _Output(use, use.product.output_positions(shape))


def _product(arranged: Callable, kind: str) -> Callable:
  """A reader whose parameter is one of two operands; `arranged` gives matrix view and product."""

  def read(found, equation, given, path):
    seen = [i for i, x in enumerate(given) if isinstance(x, View)]
    if len(seen) != 1:
      return NotImplemented
    shapes = [v.aval.shape for v in equation.invars]
    made = arranged(equation.params, shapes, given[seen[0]], seen[0])
    if made is None:
      return NotImplemented
    return _add_use(found, Use(path, kind, made[0], 1 - seen[0], made[1]), equation)

  return read


def _gather(found: Found, equation: Any, given: list[Any], path: Path) -> Any:
  view, shape = given[0], equation.outvars[0].aval.shape
  if not isinstance(view, View) or isinstance(given[1], View):
    return NotImplemented
  if (how := products.lookup(equation.params, view.shape, len(shape))) is None:
    return NotImplemented
  if (
    how.axis == 0 and shape == view.shape[1:] and len(shape) > 1
  ):  # a loop takes one layer out of a stack
    found.selections.add(path)
    return views.stacked(view)
  if len(view.shape) < 2:
    return NotImplemented
  return _embedding(found, equation, view, path, how)


def _dynamic_slice(found: Found, equation: Any, given: list[Any], path: Path) -> Any:
  view, starts, sizes = given[0], given[1:], equation.params["slice_sizes"]
  if not isinstance(view, View):
    return NotImplemented
  if all(isinstance(s, _Constant) for s in starts):
    at = [int(np.clip(s.value(), 0, n - k)) for s, n, k in zip(starts, view.shape, sizes)]
    limits = [s + k for s, k in zip(at, sizes)]
    return views.after(view, "slice", dict(start_indices=at, limit_indices=limits, strides=None))
  fixed = all(isinstance(s, _Constant) for s in starts[1:]) and sizes[1:] == view.shape[1:]
  if not fixed or sizes[0] != 1 or len(view.shape) < 2:
    return NotImplemented
  if len(view.shape) > 2:
    found.selections.add(path)
    inner = views.stacked(view)
    return views.after(inner, "reshape", {"new_sizes": (1, *inner.shape)})
  return _embedding(found, equation, view, path, products.Lookup())


def _embedding(found, equation, view, path, how):
  matrix, product = products.table(view, how)
  return _add_use(found, Use(path, "embedding", matrix, 1, product), equation)


def _broadcast(equation: Any, given: list[Any]) -> list[Any]:
  """Values of the shape of the result: axes of size 1 are repeated without an equation."""
  shape = equation.outvars[0].aval.shape

  def one(x):
    if isinstance(x, _Output):
      return _Output(x.use, np.broadcast_to(x.positions, shape))
    if isinstance(x, View) and x.shape != shape:
      places = dict(shape=shape, broadcast_dimensions=tuple(range(len(shape))))
      return views.after(x, "broadcast_in_dim", places)
    return x

  return list(map(one, given))


def _add(found: Found, equation: Any, given: list[Any], path: Path) -> Any:
  """A bias, if it is added to the outputs of a product; else a shift."""
  given = _broadcast(equation, given)
  outputs = [x for x in given if isinstance(x, _Output)]
  seen = [i for i, x in enumerate(given) if isinstance(x, View)]
  if not seen:
    return outputs[-1]  # both have the cotangent of the sum: a later bias belongs to either
  for output in outputs:
    bias = products.bias_of(output.use.view, output.positions, given[seen[0]])
    if bias is not None and output.use.bias is None:
      output.use.bias = bias
      return output
  for i in seen:
    found.uses.append(Use(path, "shift", given[i], 1 - i))
  return None


def _multiply(found: Found, equation: Any, given: list[Any], path: Path) -> Any:
  """A scale, or a constant mask of zeros and ones."""
  given = _broadcast(equation, given)
  seen = [i for i, x in enumerate(given) if isinstance(x, View)]
  if len(seen) != 1:
    return NotImplemented if seen else None
  view, other = given[seen[0]], given[1 - seen[0]]
  if isinstance(other, _Constant):
    value = other.value()
    if np.isin(value, (0, 1)).all():
      return views.masked(view, value != 0)
    if max(view.shape, default=1) < math.prod(view.shape):  # not a scale beside running averages
      return NotImplemented
  found.uses.append(Use(path, "scale", view, 1 - seen[0]))
  return None


def _select(found: Found, equation: Any, given: list[Any], path: Path) -> Any:
  """`jnp.where(mask, parameter, 0)` of a constant mask."""
  which, *cases = given
  seen = [i for i, x in enumerate(cases) if isinstance(x, View)]
  rest = [x for x in cases if not isinstance(x, View)]
  zeros = all(isinstance(x, _Constant) and not np.any(x.value()) for x in rest)
  if len(seen) != 1 or not zeros or not isinstance(which, _Constant):
    return NotImplemented
  return views.masked(cases[seen[0]], which.value().astype(int) == seen[0])


def _follow(found: Found, equation: Any, given: list[Any], path: Path) -> Any:
  """The outputs of a product after an operation that moves them."""
  [output] = given
  if not isinstance(output, _Output):
    return NotImplemented
  after = views.after(View(0, output.positions), equation.primitive.name, equation.params)
  return None if after is None else _Output(output.use, after.positions)


_MOVES = "reshape transpose squeeze expand_dims broadcast_in_dim convert_element_type copy"
_READERS = {
  **dict.fromkeys(_MOVES.split(), _follow),
  "dot_general": _product(products.dot, "dense"),
  "conv_general_dilated": _product(products.convolution, "conv"),
  "gather": _gather,
  "dynamic_slice": _dynamic_slice,
  "add": _add,
  "add_any": _add,
  "mul": _multiply,
  "select_n": _select,
}
