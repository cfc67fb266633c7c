"""What a compiled program does, read from XLA's text of it.

XLA's own analysis gives one sum for a whole program. The text tells how often a loop runs, which branch
renews factors, what travels between devices and what the largest operations are.
"""

import functools
import json
import math
import re
from typing import Any, Iterator, NamedTuple

# Operations of a symmetric eigendecomposition over n^3: reduction to tridiagonal form 4/3, its
# eigenproblem and the back-transformation of the vectors about 4 each (Golub and Van Loan, Section 8.3).
EIGH = 9.0
# Of LAPACK's other routines: n^3 of those that take one matrix [n, n] alone.
_DECOMPOSITIONS = {"syevd": EIGH, "syevj": EIGH, "potrf": 1 / 3, "getrf": 2 / 3, "geqrf": 4 / 3}
_DECOMPOSITIONS |= {"orgqr": 4 / 3, "householder": 4 / 3, "trsm": 1.0, "triangular": 1.0}
# Parts of a step that have a period of their own: scopes of the optimizers' programs.
SCOPES = ("factors", "inverses")
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_COLLECTIVES += ("collective-broadcast", "ragged-all-to-all")
# They name or place values, or end what another began.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota"}
_FREE |= {"partition-id", "replica-id", "opt-barrier", "add-dependency", "async-update", "async-done"}
_TYPE = re.compile(r"(\w+)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
  r"\b(?:calls|body|condition|to_apply|true_computation|false_computation|branch_computations)="
  r"(\{[^}]*\}|%[\w.\-]+)"
)
_START = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")


class Array(NamedTuple):
  """A type of XLA: sizes, name of the numbers' type, and whether it lies in the device's main memory."""

  dtype: str
  sizes: tuple[int, ...]
  in_memory: bool = True

  @property
  def number(self) -> int:
    return math.prod(self.sizes)

  @property
  def bytes(self) -> int:
    bits = re.search(r"\d+", self.dtype)
    wide = {"pred": 8, "token": 0}.get(self.dtype, int(bits[0]) if bits else 0)
    return self.number * wide // 8


class Instruction(NamedTuple):
  """A line of XLA's text."""

  name: str
  opcode: str
  results: list[Array]
  operands: list[str]
  attributes: str
  value: str = ""  # of a constant

  @property
  def called(self) -> list[str]:
    return [name for group in _CALLED.findall(self.attributes) for name in _NAME.findall(group)]

  @property
  def source(self) -> str:
    """Where the user's program asked for it, as JAX names it."""
    found = re.search(r'op_name="([^"]*)"', self.attributes)
    return found[1] if found else ""


class Operation(NamedTuple):
  """Work of a device in one run of a program.

  Attributes:
    name: XLA's.
    source: JAX's name of the place in the program.
    scope: of `SCOPES`, or "plain".
    times: how often it runs.
    products: arithmetic operations of matrix products, convolutions and decompositions, each time.
    precision: of these, a field of `targets.Rates`.
    moved: bytes read from and written to the device's memory, each time.
    collective: its kind if it talks to other devices, else "".
    payload: bytes of what is summed, gathered or sent, each time.
    sent: bytes that the device sends, each time, by the best known algorithm.
  """

  name: str
  source: str
  scope: str
  times: int
  products: float
  precision: str
  moved: int
  collective: str = ""
  payload: int = 0
  sent: float = 0.0


class Program(NamedTuple):
  """The operations of a program, and how many of its loops end by their own data (counted once)."""

  operations: list[Operation]
  open_loops: int


def read(text: str) -> Program:
  """The operations of `Compiled.as_text()`, of one device."""
  return _Reader(text).program()


class _Reader:
  def __init__(self, text: str):
    self._computations: dict[str, dict[str, Instruction]] = {}
    self._open_loops: set[str] = set()
    self._entry, own = "", {}
    partitions = re.search(r"num_partitions=(\d+)", text[:100_000])
    self._devices = int(partitions[1]) if partitions else 1
    for line in text.splitlines():
      if not line.startswith(" "):
        if start := _START.match(line):
          own = self._computations.setdefault(start[1], {})
          self._entry = start[1] if line.startswith("ENTRY") else self._entry
      elif " = " in line:
        instruction = _instruction(line)
        own[instruction.name] = instruction

  def program(self) -> Program:
    return Program(list(self._run(self._entry, 1, "plain")), len(self._open_loops))

  def _run(self, computation: str, times: int, scope: str) -> Iterator[Operation]:
    own = self._computations[computation]
    for instruction in own.values():
      opcode, called = instruction.opcode, instruction.called
      if opcode == "while":
        [condition, body] = (_named(instruction, part) for part in ("condition", "body"))
        turns = self._turns(instruction, condition)
        if turns is None:
          self._open_loops.add(instruction.name)
        yield from self._run(body, times * (turns or 1), scope)
      elif opcode == "conditional":
        yield from self._chosen(called, times, scope)
      elif opcode in ("call", "async-start") and called:
        yield from self._run(called[0], times, scope)
      elif opcode not in _FREE and not opcode.endswith("-done"):
        yield self._operation(instruction, own, times, scope)

  def _turns(self, loop: Instruction, condition: str) -> int | None:
    """How often a loop runs; None if its data decide. Loops of JAX count from 0 up to a number."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
      return int(known[1])
    own = self._computations[condition]
    last = list(own.values())[-1]
    if last.opcode != "compare" or "direction=LT" not in last.attributes:
      return None
    end = own[last.operands[1]]
    return int(end.value) if end.opcode == "constant" else None

  def _chosen(self, branches: list[str], times: int, scope: str) -> Iterator[Operation]:
    """Those of the branch that renews something, as its scope; otherwise those of the costliest."""
    of = {name: _innermost(self._scopes(name)) if scope == "plain" else None for name in branches}
    renewing = [name for name in branches if of[name]]
    found = {name: list(self._run(name, times, of[name] or scope)) for name in renewing or branches}
    cost = lambda operations: sum(o.times * (o.products + o.moved) for o in operations)
    yield from max(found.values(), key=cost)

  @functools.cache
  def _scopes(self, computation: str) -> frozenset[str]:
    """The scopes that instructions of a computation, and of those it calls, stand in."""
    found = set()
    for instruction in self._computations[computation].values():
      found.update(s for s in SCOPES if f"/{s}/" in f"{instruction.source}/")
      for name in instruction.called:
        found |= self._scopes(name)
    return frozenset(found)

  def _operation(self, own_instruction, own, times: int, scope: str) -> Operation:
    instruction, operands = own_instruction, self._operands(own_instruction, own)
    collective = instruction.opcode.removesuffix("-start")
    products, precision = self._products(instruction, own)
    moved = self._moved(instruction, operands)
    about = instruction.name, instruction.source, scope, times, products, precision, moved
    if collective not in _COLLECTIVES:
      return Operation(*about)
    payload = max(sum(x.bytes for x in operands), sum(x.bytes for x in _final(instruction, collective)))
    return Operation(*about, collective, payload, payload * _sent_share(collective, self._group(instruction)))

  def _operands(self, instruction: Instruction, own: dict[str, Instruction]) -> list[Array]:
    return [x for name in instruction.operands if name in own for x in own[name].results]

  def _group(self, instruction: Instruction) -> int:
    """The number of devices that talk to each other."""
    text = instruction.attributes
    if rows := re.search(r"replica_groups=\[\d+,(\d+)\]<=", text):
      return int(rows[1])
    if first := re.search(r"replica_groups=\{\{([\d,]+)\}", text):
      return first[1].count(",") + 1
    return self._devices

  def _products(self, instruction: Instruction, own: dict[str, Instruction]) -> tuple[float, str]:
    """Arithmetic of an instruction, or of those that it fuses, and its precision."""
    opcode = instruction.opcode
    if opcode == "fusion":
      parts = self._computations[instruction.called[0]]
      found = [self._products(part, parts) for part in parts.values()]
      return max(found, key=lambda x: x[0], default=(0.0, "float32"))[:0] or (
        sum(x for x, _ in found),
        max(found, key=lambda x: x[0], default=(0.0, "float32"))[1],
      )
    operands = self._operands(instruction, own)
    if opcode == "dot":
      return 2.0 * instruction.results[0].number * _contracted(instruction, operands[0]), _precision(
        instruction, operands
      )
    if opcode == "convolution":
      return _convolution(instruction, *operands[:2]), _precision(instruction, operands)
    if opcode == "custom-call":
      return _custom_call(instruction, operands), _precision(instruction, operands)
    return 0.0, "float32"

  def _moved(self, instruction: Instruction, operands: list[Array]) -> int:
    """Bytes that go from and to the device's memory."""
    opcode, results = instruction.opcode, instruction.results
    size = lambda arrays: sum(x.bytes for x in arrays if x.in_memory)
    if opcode in ("dynamic-slice", "slice", "gather"):
      return 2 * size(results)
    if opcode in ("dynamic-update-slice", "scatter"):
      return 2 * size(operands[1 if opcode == "dynamic-update-slice" else 2 :][:1])
    if opcode.endswith("-start"):  # its results name its operands, too
      return size(operands) + size(results[:1])
    if opcode == "fusion":
      return self._fused(instruction, operands)
    return size(operands) + size(results)

  def _fused(self, instruction: Instruction, operands: list[Array]) -> int:
    """As `_moved`, of a fusion: an operand of which it takes slices counts by these."""
    parts = self._computations[instruction.called[0]]
    total = 0
    users: dict[str, list[Instruction]] = {}
    for part in parts.values():
      for name in part.operands:
        users.setdefault(name, []).append(part)
    given = [part for part in parts.values() if part.opcode == "parameter"]
    in_place = 0
    for part in given:
      [array] = part.results if len(part.results) == 1 else [None]
      if array is None or not array.in_memory:
        continue
      own = users.get(part.name, [])
      if own and all(user.opcode in ("dynamic-slice", "slice", "gather") for user in own):
        total += sum(user.results[0].bytes for user in own)
      elif own and all(
        user.opcode == "dynamic-update-slice" and user.operands[0] == part.name for user in own
      ):
        in_place += sum(array.bytes - parts[user.operands[1]].results[0].bytes for user in own)
      else:
        total += array.bytes
    written = sum(x.bytes for x in instruction.results if x.in_memory)
    return total + max(written - in_place, 0)


def _instruction(line: str) -> Instruction:
  name, _, rest = line.strip().removeprefix("ROOT ").partition(" = ")
  rest = re.sub(r"/\*.*?\*/", "", rest)
  end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
  kind, rest = rest[:end], rest[end:].strip()
  opcode, _, _ = rest.partition("(")
  close = _closing(rest, len(opcode))
  arrays = [_array(*found) for found in _TYPE.findall(kind)]
  operands = _NAME.findall(rest[len(opcode) : close])
  value = rest[len(opcode) + 1 : close] if opcode == "constant" else ""
  return Instruction(name.lstrip("%"), opcode, arrays, operands, rest[close + 1 :], value)


def _named(instruction: Instruction, part: str) -> str:
  return re.search(rf"\b{part}=%([\w.\-]+)", instruction.attributes)[1]


def _closing(text: str, start: int) -> int:
  """The place of the parenthesis that closes the one at `start`."""
  depth = 0
  for i in range(start, len(text)):
    depth += {"(": 1, ")": -1}.get(text[i], 0)
    if depth == 0:
      return i
  raise ValueError(f"no closing parenthesis in {text[start : start + 80]!r}")


def _array(dtype: str, sizes: str, layout: str) -> Array:
  # A layout with S(1), S(2), ... lies in memory of the chip itself.
  sizes = tuple(int(re.sub(r"\D", "", size)) for size in sizes.split(",") if size)
  return Array(dtype, sizes, not re.search(r"S\([1-9]\)", layout))


def _final(instruction: Instruction, collective: str) -> list[Array]:
  """The results of a collective, without the operands that one that only starts repeats."""
  started = instruction.opcode.endswith("-start") and collective != "all-reduce"
  return instruction.results[1:2] if started else instruction.results


def _sent_share(collective: str, devices: int) -> float:
  """Bytes that each of some devices sends over those of the payload (rings, or the like)."""
  others = (devices - 1) / devices
  return {"all-reduce": 2 * others, "collective-permute": 1.0}.get(collective, others)


def _contracted(instruction: Instruction, left: Array) -> int:
  axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
  return math.prod(left.sizes[int(i)] for i in axes[1].split(",") if i) if axes else 1


def _precision(instruction: Instruction, operands: list[Array]) -> str:
  dtype = operands[0].dtype if operands else "f32"
  if dtype == "f64":
    return "float64"
  if dtype in ("bf16", "f16"):
    return "bfloat16"
  asked = re.search(r"operand_precision=\{(\w+)|algorithm=\w*(f32_f32_f32)", instruction.attributes)
  exact = asked and (asked[2] or asked[1] in ("high", "highest"))
  decomposition = instruction.opcode == "custom-call" and "conv" not in instruction.attributes
  return "highest" if exact or decomposition else "float32"


def _convolution(instruction: Instruction, left: Array, right: Array) -> float:
  """Counts the places where the window lies on the input: XLA writes batched products so."""
  inputs, kernel, outputs = _LABELS.search(instruction.attributes).groups()
  result, window = instruction.results[0], _window(instruction.attributes)
  total = 2.0 * result.sizes[outputs.index("b")] * result.sizes[outputs.index("f")]
  total *= right.sizes[kernel.index("i")]
  for i in range(len(window.get("size", ()))):
    option = lambda name, default, i=i: window[name][i] if name in window else default
    low = int(option("pad", "0_0").split("_")[0])
    step, base = int(option("stride", 1)), int(option("lhs_dilate", 1))
    spread, size = int(option("rhs_dilate", 1)), int(window["size"][i])
    end = (left.sizes[inputs.index(str(i))] - 1) * base + 1
    total *= _places(result.sizes[outputs.index(str(i))], size, low, step, base, spread, end)
  return total


@functools.cache
def _places(outputs: int, size: int, low: int, step: int, base: int, spread: int, end: int) -> int:
  """Pairs of an output and a place of the window that meet an element of the input."""
  at = lambda out, place: out * step + place * spread - low
  pairs = (at(out, place) for out in range(outputs) for place in range(size))
  return sum(0 <= x < end and x % base == 0 for x in pairs)


def _window(attributes: str) -> dict[str, list[str]]:
  found = _WINDOW.search(attributes)
  pairs = (part.split("=") for part in found[1].split()) if found else ()
  return {name: values.split("x") for name, values in pairs}


def _custom_call(instruction: Instruction, operands: list[Array]) -> float:
  """Arithmetic of a library's function: a convolution, a product or a decomposition."""
  target = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)[1]
  labels = _LABELS.search(instruction.attributes)
  if "conv" in target and labels:
    filters, inputs = "BackwardFilter" in target, "BackwardInput" in target
    kernel = instruction.results[0] if filters else operands[1]
    over = operands[1] if filters else operands[0] if inputs else instruction.results[0]
    return 2.0 * over.number * kernel.number / kernel.sizes[labels[2].index("o")]
  if "gemm" in target or "matmul" in target:
    axes = re.search(r'"lhs_contracting_dimensions":(\[[^\]]*\])', instruction.attributes)
    depth = math.prod(operands[0].sizes[int(i)] for i in json.loads(axes[1])) if axes else 0
    return 2.0 * instruction.results[0].number * depth
  power = next((c for name, c in _DECOMPOSITIONS.items() if name in target.lower()), 0.0)
  return power * operands[0].number * operands[0].sizes[-1] if power else 0.0


def _innermost(scopes: Any) -> str | None:
  """The scope of a branch; one that renews inverses may look at factors, not the other way."""
  return next((scope for scope in reversed(SCOPES) if scope in scopes), None)
