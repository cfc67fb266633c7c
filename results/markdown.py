"""Tables of Markdown, made from rows as their descriptions say."""

import dataclasses
import decimal
import itertools
import re
from typing import Mapping, Sequence

from results.rows import Row, Where, read, select

_FIELD = re.compile(r"\{([^{}:]+)(?::([^{}]*))?\}")
_STUDENT = decimal.Decimal(
  "2.776"
)  # two means of three seeds: 4 degrees of freedom, 5%, both sides


@dataclasses.dataclass(frozen=True)
class Column:
  """Cells of a template: "{metric}" or "{setting}" stands for a value, "{metric:.1f}" rounds it.

  A cell without one of its values is "-". `best` is "highest" or "lowest": these are bold.
  """

  cell: str
  where: Where = dataclasses.field(default_factory=dict)
  best: str = ""


@dataclasses.dataclass(frozen=True)
class Lead:
  """Cells with the difference of two means of three seeds, bold if it is more than chance."""

  metric: str  # as "test top-1", whose rows are "test top-1 mean [%]" and "... deviation [%]"
  unit: str
  over: Where  # the row that is subtracted
  where: Where = dataclasses.field(default_factory=dict)
  best: str = ""


@dataclasses.dataclass(frozen=True)
class Leads:
  """Cells with the lowest and the highest of a lead in several places."""

  lead: Lead
  places: Sequence[Where]
  where: Where = dataclasses.field(default_factory=dict)
  best: str = ""


@dataclasses.dataclass(frozen=True)
class Table:
  """A table: its lines and columns each choose rows by values of columns or settings.

  `file` is the name of a file, or the names of several with blanks.
  """

  file: str
  lines: Mapping[str, Where]
  columns: Mapping[str, Column | Lead | Leads]
  corner: str = ""
  where: Where = dataclasses.field(default_factory=dict)


def of(table: Table) -> str:
  """The table in Markdown."""
  rows = select(itertools.chain(*map(read, table.file.split())), table.where)
  made = [
    [_cell(column, rows, {**where, **column.where}) for column in table.columns.values()]
    for where in table.lines.values()
  ]
  for i, column in enumerate(table.columns.values()):
    if column.best:
      _embolden(made, i, max if column.best == "highest" else min)
  head = [table.corner, *(name.strip() for name in table.columns)]  # blanks tell equal names apart
  rule = [":--"] + ["--:"] * len(table.columns)
  body = [[label, *cells] for label, cells in zip(table.lines, made)]
  return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *body))


def _cell(column: Column | Lead | Leads, rows: Sequence[Row], where: Where) -> str:
  if isinstance(column, Lead):
    return _lead(column, rows, where)
  if isinstance(column, Leads):
    leads = [_difference(column.lead, rows, {**where, **place}) for place in column.places]
    if None in leads:
      return "-"
    return " to ".join(shown(rounded(lead[0], ".1f")) for lead in (min(leads), max(leads)))
  found, missing = select(rows, where), []

  def value(match: re.Match) -> str:
    name, form = match[1], match[2]
    chosen = {r["value"] for r in found if r["metric"] == name} or {r.get(name) for r in found}
    if len(chosen) > 1:
      raise ValueError(
        f"{name!r} has several values where {dict(where)}: {sorted(map(str, chosen))}"
      )
    text = next(iter(chosen), None)
    if not text:
      missing.append(name)
      return ""
    return shown(rounded(text, form) if form else text)

  text = _FIELD.sub(value, column.cell)
  return "-" if missing else text


def _lead(column: Lead, rows: Sequence[Row], where: Where) -> str:
  found = _difference(column, rows, where)
  if found is None:
    return "-"
  text = shown(f"{found[0]:+.2f}")
  return f"**{text}**" if abs(found[0]) > _STUDENT * found[1] else text


def _difference(
  lead: Lead, rows: Sequence[Row], where: Where
) -> tuple[decimal.Decimal, decimal.Decimal] | None:
  """The difference of two means of three seeds and its standard error."""

  def numbers(place: Where) -> list[decimal.Decimal]:
    found = select(rows, place)
    names = (f"{lead.metric} {what} [{lead.unit}]" for what in ("mean", "deviation"))
    return [
      decimal.Decimal(row["value"]) for name in names for row in found if row["metric"] == name
    ]

  both = [numbers(where), numbers({**where, **lead.over})]
  if any(len(pair) < 2 for pair in both):
    return None
  (mean, deviation), (other, other_deviation) = both
  return mean - other, ((deviation**2 + other_deviation**2) / 3).sqrt()


def rounded(number: str | decimal.Decimal, form: str) -> str:
  """A number of a row in a shorter form: halves are rounded up, 67.85 to 67.9."""
  with decimal.localcontext(rounding=decimal.ROUND_HALF_UP):
    return format(decimal.Decimal(number), form)


def shown(number: str) -> str:
  """A number with the sign of print."""
  return re.sub(r"^-(?=[\d.])", "−", number)


def _embolden(cells: list[list[str]], i: int, best) -> None:
  """Makes the best of a column bold, by the numbers that its cells begin with."""
  number = lambda text: re.match(r"−?[\d.]+(?:e-?\d+)?", text.replace(",", ""))
  values = {
    n: float(m[0].replace("−", "-")) for n, row in enumerate(cells) if (m := number(row[i]))
  }
  for n, value in values.items():
    if value == best(values.values()):
      cells[n][i] = f"**{cells[n][i]}**"
