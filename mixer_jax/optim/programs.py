"""Runs of layers, and parameters that are computed, in a program that JAX has traced (a jaxpr)."""

import collections
from typing import Any, Iterator, Sequence

import numpy as np

# Equations whose result has the numbers of their first operand, or a part of them, in their order.
_IDENTITIES = frozenset(
  "convert_element_type stop_gradient reduce_precision copy copy_p device_put sharding_constraint"
  " reshard mesh_cast pvary pcast pbroadcast optimization_barrier name slice dynamic_slice squeeze"
  " reshape".split()
)


def inside(equation: Any) -> Iterator[Any]:
  """The programs that an equation runs: a loop's body, the branches of a condition."""
  for value in equation.params.values():
    for inner in value if isinstance(value, tuple | list) else (value,):
      inner = getattr(inner, "jaxpr", inner)  # of a closed one
      if hasattr(inner, "eqns"):
        yield inner


def scattered(program: Any) -> Iterator[tuple[int, ...]]:
  """The shapes of all arrays that are added to, or put into, others by an index."""
  for equation in program.eqns:
    if equation.primitive.name.startswith("scatter"):
      yield equation.invars[2].aval.shape
    for inner in inside(equation):
      yield from scattered(inner)


def tag(serial: int, number: int, copies: int = 1) -> np.ndarray:
  """An operand by which `runs` knows a call, and how many copies of its rows `jax.vmap` makes."""
  return np.zeros((serial, number, copies, 0, 0), np.float32)


def runs(program: Any, serial: int, companions: Sequence[int]) -> dict[int, int]:
  """How often each tagged call runs, by number; of a stack of layers, each of its layers.

  A layer is traced more or less often than it runs: JAX traces the body of a loop, or of a program
  that it has in its cache, once, and some bodies twice.

  Args:
    program: with companions of the shape [..., index, serial, 0] beside the parameters of layers.
    serial: of this trace, see `layer_calls.calls`.
    companions: the index of the companion of each call.
  """
  total = collections.Counter()
  for equation in program.eqns:
    shapes, name = _shapes(equation.invars), equation.primitive.name
    tags = [s for s in shapes if len(s) == 5 and s[0] == serial and s[3:] == (0, 0)]
    if tags and name.startswith("custom_vmap"):
      total[tags[0][1]] += tags[0][2]
      continue
    own = collections.Counter()
    for inner in inside(equation):
      found = collections.Counter(runs(inner, serial, companions))
      own = own | found if name == "cond" else own + found  # the largest of branches
    if name == "scan":  # over a stack of layers, whose companions lose an axis, or over one layer
      body, length = next(inside(equation)), equation.params["length"]
      axes = lambda shapes: {s[-3]: len(s) for s in shapes if s[-2:] == (serial, 0)}
      stacked = axes(shapes).items() - axes(_shapes(body.invars)).items()
      own = {n: c if companions[n] in dict(stacked) else c * length for n, c in own.items()}
    total.update(own)
  return dict(total)


def _shapes(variables: Sequence[Any]) -> list[tuple[int, ...]]:
  return [getattr(x.aval, "shape", ()) for x in variables]


def is_sliced(x: Any) -> bool:
  """Whether an array is a part of another that the traced function cuts out by an index."""
  return any(equation.primitive.name in ("slice", "dynamic_slice") for equation, _ in _origins(x))


def is_computed(x: Any) -> bool:
  """Whether a parameter inside a layer is computed from others, as far as JAX tells it.

  Changes before a `jax.jit`, `nn.remat` or `nn.scan` are not seen inside of it.
  """
  return any(source is None for _, source in _origins(x))


def _origins(x: Any) -> Iterator[tuple[Any, int | None]]:
  """The equations that hand an array on, the last first, each with its `_source`."""
  while (equation := getattr(x, "parent", None)) is not None:
    i = next(i for i, out in enumerate(equation.outvars) if out is x.val)
    yield equation, (source := _source(equation, i))
    if source is None:
      return
    x = equation.in_tracers[source]


def _source(equation: Any, i: int) -> int | None:
  """Which input an equation hands on as its i-th output; None: the output is computed."""
  if equation.primitive.name in _IDENTITIES:
    return i if len(equation.outvars) > 1 else 0
  if equation.primitive.name not in ("jit", "pjit"):
    return None
  program = equation.params["jaxpr"].jaxpr
  made_by = {out: e for e in program.eqns for out in e.outvars}
  x = program.outvars[i]
  while x in made_by:
    inner = made_by[x]
    if (source := _source(inner, inner.outvars.index(x))) is None:
      return None
    x = inner.invars[source]
  return program.invars.index(x) if x in program.invars else None
