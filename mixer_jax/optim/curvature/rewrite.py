"""Runs a program with a tap at each use of a parameter.

A tap hands its result on and sees, in the backward pass, the gradient of it. What it adds up there
comes out as the gradient of an accumulator: an array of zeros that travels with its parameter
through scan, remat, cond and shard_map, so that JAX's own rules stack and add it.
"""

from typing import Any, Callable, Mapping, NamedTuple

import jax
from jax.extend import core
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from mixer_jax.optim.curvature import trace

Tap = Callable[[Any, Any, dict[str, Any]], Any]  # (operand, result, accumulators) -> result


class Stack(NamedTuple):
  """Values that stand for those of the layers of a stack, in a program whose loops are unrolled."""

  parts: tuple[Any, ...]


class Rewritten:
  """A program whose uses are tapped.

  Args:
    program: the program.
    taps: by the path of an equation; it gets the accumulators of the parameter that is read.
    selections: paths of equations that take one layer out of a stack.
    unroll: whether loops with taps are unrolled.
  """

  def __init__(
    self,
    program: core.ClosedJaxpr,
    taps: Mapping[trace.Path, Tap],
    selections: set,
    unroll: bool = False,
  ):
    self._program, self._taps, self._selections = program, taps, selections
    self._unroll = unroll
    self._touched = {p[:n] for p in (*taps, *selections) for n in range(1, len(p) + 1)}

  def __call__(self, arguments: list[Any], accumulators: Mapping[int, dict[str, Any]]) -> list[Any]:
    """The program's results; accumulators by the number of the argument, and then by layer."""
    beside = [accumulators.get(i, {}) for i in range(len(arguments))]
    return self._run(self._program.jaxpr, self._program.consts, arguments, beside, ())[0]

  def _run(self, jaxpr, consts, arguments, beside, path):
    """The results, and for each the names of the accumulators that go with it as with a parameter."""
    values = dict(zip(jaxpr.constvars, consts)) | dict(zip(jaxpr.invars, arguments))
    held = {v: own for v, own in zip(jaxpr.invars, beside) if own}
    value = lambda v: v.val if isinstance(v, core.Literal) else values[v]
    own = lambda v: {} if isinstance(v, core.Literal) else held.get(v, {})
    for i, equation in enumerate(jaxpr.eqns):
      here = (*path, i)
      given, near = [value(v) for v in equation.invars], [own(v) for v in equation.invars]
      results, names = self._equation(equation, given, near, here)
      values.update(zip(equation.outvars, results))
      union = _union(near)
      if here in self._selections:
        union = _selected(union, given, equation)
      held.update((v, {name: union[name] for name in n}) for v, n in zip(equation.outvars, names))
    return [value(v) for v in jaxpr.outvars], [tuple(own(v)) for v in jaxpr.outvars]

  def _equation(self, equation, given, near, here):
    """The results, and the names of their accumulators, see `_run`; results of taps have none."""
    name, params, none = equation.primitive.name, equation.params, [()] * len(equation.outvars)
    calls = name in ("jit", "pjit", "closed_call") and any(near)
    if (here not in self._touched and not calls) or here in self._selections:
      results = trace.evaluate(equation, given, self._program.jaxpr.debug_info)
      return results, [tuple(_union(near))] * len(results)
    if here in self._taps:
      [result] = trace.evaluate(equation, given, self._program.jaxpr.debug_info)
      return [self._taps[here](given, result, _union(near))], none
    if name == "scan":
      return self._scan(params, given, near, here)
    if name == "cond":
      return self._cond(params, given, near, here), none
    if name in ("checkpoint", "remat2"):
      found = []

      def run(*args):
        results, names = self._run(params["jaxpr"], (), args, near, here)
        found.append(names)
        return results

      kept = dict(prevent_cse=params["prevent_cse"], policy=params["policy"])
      return jax.checkpoint(run, **kept)(*given), found[0]
    if name == "shard_map":
      return self._shard_map(params, given, near, here), none
    inner = params.get("jaxpr", params.get("call_jaxpr"))
    jaxpr, consts = (inner.jaxpr, inner.consts) if hasattr(inner, "jaxpr") else (inner, ())
    return self._run(jaxpr, consts, given, near, here)

  def _scan(self, params, given, near, here):
    body = params["jaxpr"]
    n, m = trace.scan_operands(params)

    def step(carry, x):
      xs, stacks = x
      beside = [*near[:m], *stacks]
      results, _ = self._run(body.jaxpr, body.consts, [*given[:n], *carry, *xs], beside, here)
      return results[: m - n], results[m - n :]

    names = [tuple(x) for x in near[n:m]] + [()] * (len(body.jaxpr.outvars) - (m - n))
    if self._unroll:
      return _unrolled(step, params, given[n:m], given[m:], near[m:]), names
    keep = {
      k: params[k] for k in ("length", "reverse", "unroll", "_split_transpose") if k in params
    }
    carry, ys = jax.lax.scan(step, given[n:m], (given[m:], near[m:]), **keep)
    return [*carry, *ys], names

  def _cond(self, params, given, near, here):
    def branch(b, jaxpr):
      return lambda *args: self._run(jaxpr.jaxpr, jaxpr.consts, args, near[1:], (*here, b))[0]

    branches = [branch(b, jaxpr) for b, jaxpr in enumerate(params["branches"])]
    return jax.lax.switch(jnp.asarray(given[0], jnp.int32), branches, *given[1:])

  def _shard_map(self, params, given, near, here):
    run = lambda args, beside: self._run(params["jaxpr"], (), args, beside, here)[0]
    names = "manual_axes" if "manual_axes" in params else "newly_manual_axes"  # from JAX 0.12 on
    specs = list(params["in_specs"]), jax.tree.map(lambda _: PartitionSpec(), near)
    return jax.shard_map(
      run,
      mesh=params["mesh"],
      in_specs=specs,
      out_specs=list(params["out_specs"]),
      axis_names=set(params[names]),
      check_vma=params["check_vma"],
    )(given, near)


def _union(near: list[dict[str, Any]]) -> dict[str, Any]:
  return {name: x for accumulators in near for name, x in accumulators.items()}


def _unrolled(step, params, carry, xs, stacks):
  """The results of a loop, step by step."""
  order = range(params["length"])
  rows = {}
  for i in reversed(order) if params["reverse"] else order:
    own = [{name: stack.parts[i] for name, stack in one.items()} for one in stacks]
    carry, rows[i] = step(carry, ([x[i] for x in xs], own))
  return [*carry, *(jnp.stack(y) for y in zip(*(rows[i] for i in order)))]


def _selected(accumulators: dict[str, Any], given: list[Any], equation: Any) -> dict[str, Any]:
  """The accumulators of the layer that a loop takes out of a stack."""
  index = jnp.reshape(given[1], ())
  if equation.primitive.name == "gather":  # its indices may count from the end
    index = jnp.where(index < 0, index + given[0].shape[0], index)
  take = lambda x: jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False)
  return jax.tree.map(take, accumulators)
