"""Rows of the CSV files of this folder, one number each."""

import csv
import pathlib
from typing import Iterable, Mapping

FOLDER = pathlib.Path(__file__).parent
Row = dict[str, str]
Where = Mapping[str, str | tuple[str, ...]]


def read(name: str) -> list[Row]:
  """The rows of a file, each with its settings as further columns."""
  with (FOLDER / f"{name}.csv").open(newline="") as file:
    return [settings(row["settings"]) | row for row in csv.DictReader(file)]


def settings(text: str) -> dict[str, str]:
  """The settings of "batch=64; peer=timm" by their names."""
  pairs = (part.partition("=") for part in text.split("; ") if part)
  return {name: value for name, _, value in pairs}


def select(rows: Iterable[Row], where: Where) -> list[Row]:
  """The rows that have these values in these columns; a row lacks a setting as if it were ""."""
  allowed = {key: (v,) if isinstance(v, str) else v for key, v in where.items()}
  return [row for row in rows if all(row.get(key, "") in v for key, v in allowed.items())]
