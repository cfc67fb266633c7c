"""What a compiled program does: arithmetic, memory that moves, and messages between devices.

XLA's own analysis gives one sum for a whole program. Its text tells how often a loop runs, which branch
renews factors, what travels between devices and what the largest operations are.
"""

import re
from typing import Any, Iterator, NamedTuple

from mixer_jax.optim import algebra, averages
from mixer_jax.planning import arithmetic, hlo
from mixer_jax.planning.hlo import Array, Instruction

# Parts of a step that have a period of their own: scopes of the optimizers' programs.
SCOPES = (averages.SCOPE, algebra.SCOPE)
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_COLLECTIVES += ("collective-broadcast", "ragged-all-to-all")
_SLICES = ("dynamic-slice", "slice", "gather")
# They name or place values, or end what another began.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota"}
_FREE |= {
  "partition-id",
  "replica-id",
  "opt-barrier",
  "add-dependency",
  "async-update",
  "async-done",
}


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
  return _Reader(hlo.parse(text)).program()


class _Reader:
  def __init__(self, text: hlo.Text):
    self._computations, self._entry, self._devices = text
    self._open_loops: set[str] = set()
    self._within: dict[str, set[str]] = {}  # see `_scopes`

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

  def _scopes(self, computation: str) -> set[str]:
    """The scopes that instructions of a computation, and of those it calls, stand in."""
    if computation not in self._within:
      found = self._within[computation] = set()
      for instruction in self._computations[computation].values():
        found.update(s for s in SCOPES if f"/{s}/" in f"{instruction.source}/")
        for name in instruction.called:
          found |= self._scopes(name)
    return self._within[computation]

  def _operation(
    self, instruction: Instruction, own: dict[str, Instruction], times: int, scope: str
  ) -> Operation:
    operands = self._operands(instruction, own)
    products, precision = self._products(instruction, own)
    moved = self._moved(instruction, operands)
    about = instruction.name, instruction.source, scope, times, products, precision, moved
    if started := self._fused_collective(instruction):
      instruction, own = started
      operands = self._operands(instruction, own)
    collective = instruction.opcode.removesuffix("-start")
    if collective not in _COLLECTIVES:
      return Operation(*about)
    total = lambda arrays: sum(x.bytes for x in arrays)
    payload = max(total(operands), total(_final(instruction, collective)))
    share = _sent_share(collective, self._group(instruction))
    return Operation(*about, collective, payload, share * payload)

  def _fused_collective(self, fusion: Instruction) -> tuple[Instruction, dict] | None:
    """The collective that a fusion starts, with its neighbours.

    On a TPU it goes on in fusions that calculate, which name it again.
    """
    inside = self._computations[fusion.called[0]] if fusion.opcode == "fusion" else {}
    if not any('"AsyncCollectiveStart"' in part.attributes for part in inside.values()):
      return None
    return next((part, inside) for part in inside.values() if part.opcode in _COLLECTIVES)

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
    if instruction.opcode == "fusion":
      parts = self._computations[instruction.called[0]]
      found = [self._products(part, parts) for part in parts.values()]
      _, precision = max(found, key=lambda pair: pair[0], default=(0.0, "float32"))
      return sum(products for products, _ in found), precision
    return arithmetic.products(instruction, self._operands(instruction, own))

  def _moved(self, instruction: Instruction, operands: list[Array]) -> int:
    """Bytes that go from and to the device's memory."""
    opcode, results = instruction.opcode, instruction.results
    size = lambda arrays: sum(x.bytes for x in arrays if x.in_memory)
    if opcode in _SLICES:
      return 2 * size(results)
    if opcode in ("dynamic-update-slice", "scatter"):
      return 2 * size(operands[1 if opcode == "dynamic-update-slice" else 2 :][:1])
    if opcode.endswith("-start"):  # its results name its operands, too
      return size(operands) + size(results[:1])
    if opcode == "fusion":
      return self._fused(instruction, operands)
    return size(operands) + size(results)

  def _fused(self, instruction: Instruction, operands: list[Array]) -> int:
    """As `_moved`, of a fusion: of an operand that it slices, or changes in place, the slices count."""
    parts = self._computations[instruction.called[0]]
    users: dict[str, list[Instruction]] = {}
    for part in parts.values():
      for name in part.operands:
        users.setdefault(name, []).append(part)
    read, kept = 0, 0
    for part in parts.values():
      if part.opcode != "parameter" or len(part.results) != 1 or not part.results[0].in_memory:
        continue
      size, own = part.results[0].bytes, users.get(part.name, [])
      updates = lambda user, name=part.name: _updates(user, name)
      if own and all(user.opcode in _SLICES for user in own):
        read += sum(user.results[0].bytes for user in own)
      elif own and all(map(updates, own)):
        kept += sum(size - parts[user.operands[1]].results[0].bytes for user in own)
      else:
        read += size
    written = sum(x.bytes for x in instruction.results if x.in_memory)
    return read + max(written - kept, 0)


def _updates(user: Instruction, name: str) -> bool:
  """Whether an instruction changes a part of an array in place."""
  return user.opcode == "dynamic-update-slice" and user.operands[0] == name


def _named(instruction: Instruction, part: str) -> str:
  return re.search(rf"\b{part}=%([\w.\-]+)", instruction.attributes)[1]


def _final(instruction: Instruction, collective: str) -> list[Array]:
  """The results of a collective, without the operands that one that only starts repeats."""
  started = instruction.opcode.endswith("-start") and collective != "all-reduce"
  return instruction.results[1:2] if started else instruction.results


def _sent_share(collective: str, devices: int) -> float:
  """Bytes that each of some devices sends over those of the payload (rings, or the like)."""
  others = (devices - 1) / devices
  return {"all-reduce": 2 * others, "collective-permute": 1.0}.get(collective, others)


def _innermost(scopes: Any) -> str | None:
  """The scope of a branch; one that renews inverses may look at factors, not the other way."""
  return next((scope for scope in reversed(SCOPES) if scope in scopes), None)
