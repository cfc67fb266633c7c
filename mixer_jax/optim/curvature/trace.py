"""Finds every place where a program reads a parameter: from a jaxpr to a list of uses.

The walk follows views of parameters (`views`) and outputs of products through the equations of a
program, into jit, scan, cond, remat, custom_jvp and shard_map. A reader that is no product, no
scale, no shift and no view (`readers`) is a leak: its parameter has no layer, and the reason is kept.
"""

from typing import Any, Callable

import jax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

from mixer_jax.optim.curvature import readers, views
from mixer_jax.optim.curvature.uses import Constant, Found, Output, Path, leak
from mixer_jax.optim.curvature.views import View


def find(program: core.ClosedJaxpr, leaves: dict[int, int]) -> Found:
  """Walks a program; `leaves` maps numbers of its arguments to those of parameters."""
  found = Found(debug=program.jaxpr.debug_info)
  values = [
    views.whole(leaves[i], v.aval.shape) if i in leaves else None
    for i, v in enumerate(program.jaxpr.invars)
  ]
  for value in _walk(found, program.jaxpr, program.consts, values, ()):
    leak(found, value, "is an output of the function")
  return found


def _walk(found: Found, jaxpr: Any, consts: Any, values: list[Any], path: Path) -> list[Any]:
  """The values of a program's results; consts may be arrays, or values known outside."""
  known = lambda c: (
    c if c is None or isinstance(c, View | Constant) else Constant(lambda: _array(c))
  )
  environment = dict(zip(jaxpr.invars, values)) | dict(zip(jaxpr.constvars, map(known, consts)))

  def value(v):
    return Constant(lambda: v.val) if isinstance(v, core.Literal) else environment.get(v)

  for i, equation in enumerate(jaxpr.eqns):
    given = [value(v) for v in equation.invars]
    results = _equation(found, equation, given, (*path, i))
    environment.update(zip(equation.outvars, results))
  return [value(v) for v in jaxpr.outvars]


def _equation(found: Found, equation: Any, given: list[Any], path: Path) -> list[Any]:
  """The values of an equation's results."""
  none = [None] * len(equation.outvars)
  found.narrow |= any(map(_is_narrow, equation.outvars))
  if all(isinstance(x, Constant) for x in given) and not equation.effects:
    return _constants(equation, given, found.debug)
  if not any(isinstance(x, View | Output) for x in given):
    return none
  name = equation.primitive.name
  if isinstance(given[0], Output) and name in (*views.PARTS, "slice"):
    _note_slices(given[0], name, equation.params)
    return none
  if name in _INNER:
    return _INNER[name](found, equation, given, path)
  if len(given) == 1 and isinstance(given[0], View):
    if (after := views.after(given[0], name, equation.params)) is not None:
      return [after]
    if name in views.PARTS:
      return views.parts(given[0], name, equation.params)
    if name == "stop_gradient":
      return none
  if name in readers.READERS:
    result = readers.READERS[name](found, equation, given, path)
    if result is not NotImplemented:
      return [result]
  for x in given:
    leak(found, x, f"is read by {name}")
  return none


def _note_slices(output: Output, name: str, params: dict[str, Any]) -> None:
  """Keeps which outputs each slice of a product's result has: those of fused heads."""
  whole = View(0, output.positions)
  several = name in views.PARTS
  parts = views.parts(whole, name, params) if several else [views.after(whole, name, params)]
  output.use.slices += [np.unique(part.positions) for part in parts]


def _is_narrow(variable: Any) -> bool:
  dtype = getattr(variable.aval, "dtype", np.dtype(bool))
  return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits <= 16


def _constants(equation: Any, given: list[Constant], debug: Any) -> list[Constant]:
  results = []

  def compute():
    if not results:
      arguments = [x.value() for x in given]
      with jax.ensure_compile_time_eval():
        results.extend(map(_array, evaluate(equation, arguments, debug)))
    return results

  return [Constant(lambda i=i: compute()[i]) for i in range(len(equation.outvars))]


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


def scan_operands(params: dict[str, Any]) -> tuple[int, int]:
  """How many of a scan's first operands are constants, and how many are constants or carried."""
  if "ft_in" in params:  # from JAX 0.12 on: the tree of (constants, carried, scanned)
    constants, carried, _ = map(len, params["ft_in"].unpack())
  else:
    constants, carried = params["num_consts"], params["num_carry"]
  return constants, constants + carried


def _scan(found: Found, equation: Any, given: list[Any], path: Path) -> list[Any]:
  """Carried values stay views if the body hands them on as they are; xs are layers of a stack."""
  body, params = equation.params["jaxpr"], equation.params
  n, m = scan_operands(params)
  handed_on = [
    isinstance(x, View) and body.jaxpr.outvars[i] is body.jaxpr.invars[n + i]
    for i, x in enumerate(given[n:m])
  ]
  for x, kept in zip(given[n:m], handed_on):
    if not kept:
      leak(found, x, "changes in a loop")
  outer = lambda x: x if isinstance(x, View | Constant) else None
  carry = [x if kept else None for x, kept in zip(given[n:m], handed_on)]
  layers = [views.stacked(x) if isinstance(x, View) else None for x in given[m:]]
  inside = [*map(outer, given[:n]), *carry, *layers]
  found.runs *= params["length"]
  results = _walk(found, body.jaxpr, body.consts, inside, path)
  found.runs //= params["length"]
  for x, kept in zip(results, [*handed_on, *[False] * len(results)]):
    if not kept:
      leak(found, x, "is a result of a loop")
  return [*carry, *[None] * (len(equation.outvars) - len(carry))]


def _cond(found: Found, equation: Any, given: list[Any], path: Path) -> list[Any]:
  outer = [x if isinstance(x, View | Constant) else None for x in given[1:]]
  found.branches += 1
  for b, branch in enumerate(equation.params["branches"]):
    for x in _walk(found, branch.jaxpr, branch.consts, outer, (*path, b)):
      leak(found, x, "is a result of a branch")
  found.branches -= 1
  return [None] * len(equation.outvars)


def _shard_map(found: Found, equation: Any, given: list[Any], path: Path) -> list[Any]:
  whole = []
  for x, spec in zip(given, equation.params["in_specs"]):
    if split := any(part is not None for part in spec):
      leak(found, x, "is split over devices by a shard_map")
    whole.append(None if split else x)
  for x in _walk(found, equation.params["jaxpr"], (), whole, path):
    leak(found, x, "is a result of a shard_map")
  return [None] * len(equation.outvars)


def _unseen(where: str) -> Callable:
  def walk(found, equation, given, path):
    for x in given:
      leak(found, x, f"is read in {where}, which cannot be seen")
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
