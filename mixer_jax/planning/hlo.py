"""XLA's text of a compiled program, as instructions."""

import math
import re
from typing import NamedTuple

_TYPE = re.compile(r"(\w+)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
  r"\b(?:calls|body|condition|to_apply|true_computation|false_computation|branch_computations)="
  r"(\{[^}]*\}|%[\w.\-]+)"
)
_START = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")


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


class Text(NamedTuple):
  """A program: its computations by name, the first one's name, and the devices that share it."""

  computations: dict[str, dict[str, Instruction]]
  entry: str
  devices: int


def parse(text: str) -> Text:
  """The instructions of `Compiled.as_text()`, by their names in their computations."""
  computations: dict[str, dict[str, Instruction]] = {}
  entry, own = "", {}
  for line in text.splitlines():
    if not line.startswith(" "):
      if start := _START.match(line):
        own = computations.setdefault(start[1], {})
        entry = start[1] if line.startswith("ENTRY") else entry
    elif " = " in line:
      instruction = _instruction(line)
      own[instruction.name] = instruction
  partitions = re.search(r"num_partitions=(\d+)", text[: text.find("\n")])
  return Text(computations, entry, int(partitions[1]) if partitions else 1)


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
