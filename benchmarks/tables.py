"""Tables in Markdown."""

from typing import Iterable, Sequence

from mixer_jax.report import markdown


def show(titles: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> None:
  """Prints a table, each row as soon as it is known.

  Args:
    titles: of the columns.
    rows: cells in the order of the titles.
    texts: how many of the first columns are texts; the others are numbers.
  """
  for line in markdown.table(titles, rows, texts):
    print(line, flush=True)


def number(value: float | None, form: str, unit: float = 1.0) -> str:
  """A value in some unit; "-" if it was not measured."""
  return "-" if value is None else format(value / unit, form)


def mebibytes(size: int) -> str:
  """A size in bytes, in MiB."""
  return f"{size / 2**20:.0f}"
