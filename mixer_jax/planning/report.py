"""What a plan says: memory, communication, and the least time of a step."""

import collections
import dataclasses
from typing import Any, Iterable, Iterator, Mapping, NamedTuple, Sequence

from mixer_jax.planning.operations import Operation
from mixer_jax.planning.programs import Compiled
from mixer_jax.planning.targets import Target
from mixer_jax.report.markdown import table

_LARGEST = 10  # operations that are listed
_PLAIN = "plain"


class Bound(NamedTuple):
  """The least seconds of some operations if nothing but one resource counts."""

  arithmetic: float
  memory: float
  links: float

  @property
  def seconds(self) -> float:
    return max(self)

  @property
  def by(self) -> str:
    return max(self._asdict().items(), key=lambda item: item[1])[0]


@dataclasses.dataclass(frozen=True)
class Step:
  """A kind of step of training; numbers are those of a device.

  Attributes:
    kind: "plain", or the scope of the program that it adds to a plain step (see `operations.SCOPES`).
    every: how many steps pass from one to the next.
    operations: arithmetic ones, of products and decompositions.
    bytes: moved from and to memory.
    collectives: by kind their number and the bytes of what is summed or sent.
    bound: seconds.
  """

  kind: str
  every: int
  operations: float
  bytes: float
  collectives: Mapping[str, tuple[int, int]]
  bound: Bound


@dataclasses.dataclass(frozen=True)
class Plan:
  """The programs of a config on some devices.

  Attributes:
    target: the devices.
    batch_size: examples of a step.
    programs: training, evaluation.
    steps: the kinds of steps.
    steps_per_epoch: of the config.
    largest_batch: about the largest one that fits; None: not known.
    notes: lines on data that stand in, and the like.
  """

  target: Target
  batch_size: int
  programs: Sequence[Compiled]
  steps: Sequence[Step]
  steps_per_epoch: int
  largest_batch: int | None
  notes: Sequence[str] = ()

  @property
  def step_seconds(self) -> float:
    """The least mean time of a step: its parts come one after the other, rare ones count by their share."""
    return sum(step.bound.seconds / step.every for step in self.steps)


def bound(operations: Iterable[Operation], target: Target, calls: float = 1) -> Bound:
  """The least seconds of some operations, over `calls`, by the published peaks of a device."""
  rates, arithmetic, moved, links = target.kind.rates, 0.0, 0.0, 0.0
  for operation in operations:
    if operation.products:
      # A TPU has no unit for float64: it is emulated, more slowly than at precision "highest".
      rate = getattr(rates, operation.precision) or rates.highest
      arithmetic += operation.times * operation.products / rate
    moved += operation.times * operation.moved
    links += operation.times * target.send_seconds(operation.sent)
  return Bound(arithmetic / calls, moved / rates.memory / calls, links / calls)


def steps(training: Compiled, target: Target, periods: Mapping[str, int]) -> list[Step]:
  """The kinds of steps of a program of training; `periods` are those of the optimizer by scope."""
  found: dict[str, list[Operation]] = {_PLAIN: []}
  for operation in training.program.operations:
    found.setdefault(operation.scope, []).append(operation)
  return [_step(kind, own, training.steps, target, periods) for kind, own in found.items()]


def _step(kind, operations, calls, target, periods) -> Step:
  sums = collections.defaultdict(lambda: (0, 0))
  for operation in operations:
    if operation.collective:
      number, payload = sums[operation.collective]
      again = operation.times / calls
      sums[operation.collective] = number + again, payload + again * operation.payload
  whole = {name: (round(number), round(size)) for name, (number, size) in sums.items()}
  products = sum(o.times * o.products for o in operations) / calls
  moved = sum(o.times * o.moved for o in operations) / calls
  return Step(kind, periods.get(kind, 1), products, moved, whole, bound(operations, target, calls))


def largest(training: Compiled, target: Target) -> list[tuple[Operation, float]]:
  """The operations of a step that take the most time by their bound, and these seconds."""
  timed = [(o, bound([o], target, training.steps).seconds) for o in training.program.operations]
  return sorted(timed, key=lambda pair: -pair[1])[:_LARGEST]


def lines(plan: Plan) -> Iterator[str]:
  """The plan as text with tables in Markdown."""
  target, memory = plan.target, plan.target.usable_memory
  limit = f"{_gib(target.kind.memory)} GiB of memory"
  if memory < target.kind.memory:
    limit += f", of which JAX takes {_gib(memory)}"
  yield f"{target.number} x {target.spec.partition(':')[0]}, each with {limit}; batch {plan.batch_size}"
  yield from plan.notes
  yield from ("compiled for these devices, not run on them", "")
  yield from table(
    ("program", "compiled in s", "arguments GiB", "results", "temporaries", "together", "fits"),
    [_program(c, memory) for c in plan.programs],
  )
  if plan.largest_batch is not None:
    yield f"the largest batch that fits: about {plan.largest_batch:,}"
  if not plan.steps:
    return
  yield ""
  titles = ("a device, in a step", "every", "TFLOP", "GB moved", "collectives", "arithmetic ms")
  yield from table((*titles, "memory ms", "links ms"), map(_row, plan.steps))
  if loops := plan.programs[0].program.open_loops:
    yield f"{loops} loops end by their own data and count as one turn"
  seconds, epoch = plan.step_seconds, plan.step_seconds * plan.steps_per_epoch
  by = max(plan.steps, key=lambda step: step.bound.seconds / step.every).bound.by
  rate = plan.batch_size / seconds
  yield (
    f"bound: a step takes at least {1e3 * seconds:.3g} ms ({by}), {rate:,.0f} examples/s, an epoch of"
    f" {plan.steps_per_epoch:,} steps {epoch:.3g} s; peaks are published ones, and nothing is measured"
  )
  yield ""
  rows = [
    (o.name, o.scope, f"{o.times / plan.programs[0].steps:.3g}", f"{1e3 * s:.3g}", o.source[-70:])
    for o, s in largest(plan.programs[0], target)
  ]
  yield from table(("largest operations", "in", "times", "ms", "source"), rows)


def as_json(plan: Plan) -> dict[str, Any]:
  """The same for programs: bytes, seconds and operations."""
  target = plan.target
  return {
    "devices": target.spec,
    "number": target.number,
    "hosts": target.hosts,
    "memory": target.kind.memory,
    "usable_memory": target.usable_memory,
    "batch_size": plan.batch_size,
    "largest_batch": plan.largest_batch,
    "notes": list(plan.notes),
    "programs": [
      {
        **{k: v for k, v in c._asdict().items() if k != "program"},
        "bytes": c.bytes,
        "fits": fits(c, target.usable_memory),
      }
      for c in plan.programs
    ],
    "steps": [{**dataclasses.asdict(step), "bound": step.bound._asdict()} for step in plan.steps],
    "step_seconds": plan.step_seconds,
    "epoch_seconds": plan.step_seconds * plan.steps_per_epoch,
    "largest": [{**o._asdict(), "seconds": s} for o, s in largest(plan.programs[0], target)],
  }


def fits(compiled: Compiled, memory: float) -> bool:
  """Whether a program was compiled and needs no more than the memory, in bytes."""
  return not compiled.refused and compiled.bytes <= memory


def _program(compiled: Compiled, memory: float) -> list[str]:
  sizes = compiled.arguments, compiled.results, compiled.temporaries, compiled.bytes
  cells = ["-"] * 4 if compiled.refused else list(map(_gib, sizes))
  answer = "yes" if fits(compiled, memory) else compiled.refused or "no"
  return [compiled.name, f"{compiled.seconds:.0f}", *cells, answer]


def _row(step: Step) -> list[str]:
  talk = [f"{n} {name} ({size / 1e6:.3g} MB)" for name, (n, size) in step.collectives.items()]
  name = step.kind if step.kind == _PLAIN else f"+ {step.kind}"
  sizes = f"{step.operations / 1e12:.3g}", f"{step.bytes / 1e9:.3g}", ", ".join(talk) or "none"
  return [name, str(step.every), *sizes, *(f"{1e3 * seconds:.3g}" for seconds in step.bound)]


def _gib(size: float) -> str:
  return f"{size / 2**30:.3g}"
