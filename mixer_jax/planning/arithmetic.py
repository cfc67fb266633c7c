"""Arithmetic of instructions: products, convolutions and decompositions; all else is bound by memory."""

import functools
import json
import math
import re

from mixer_jax.planning.hlo import Array, Instruction

# Operations of a symmetric eigendecomposition over n^3: reduction to tridiagonal form 4/3, its
# eigenproblem and the back-transformation of the vectors about 4 each (Golub and Van Loan, Section 8.3).
EIGH = 9.0
# Of LAPACK's routines, n^3 of those that take one matrix [n, n] alone.
_DECOMPOSITIONS = {"syevd": EIGH, "syevj": EIGH, "potrf": 1 / 3, "getrf": 2 / 3, "geqrf": 4 / 3}
_DECOMPOSITIONS |= {"orgqr": 4 / 3, "householder": 4 / 3, "trsm": 1.0, "triangular": 1.0}
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")


def products(instruction: Instruction, operands: list[Array]) -> tuple[float, str]:
  """Operations of an instruction that is no fusion, and their precision, a field of `targets.Rates`."""
  opcode = instruction.opcode
  if opcode == "dot":
    found = 2.0 * instruction.results[0].number * _contracted(instruction, operands[0])
  elif opcode == "convolution":
    found = _convolution(instruction, *operands[:2])
  elif opcode == "custom-call":
    found = _custom_call(instruction, operands)
  else:
    return 0.0, "float32"
  return found, _precision(instruction, operands)


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
