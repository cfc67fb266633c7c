"""The measurements in `results/`, and what the pages show of them."""

import csv
import math

import pytest

from mixer_jax.report import study_rows
from results import __main__ as program
from results import markdown, pictures, rows, tables
from results.markdown import Column, Lead, Table

FILES = sorted(rows.FOLDER.glob("*.csv"))


def test_pages_and_pictures_show_the_rows():
  """After `python -m results` this holds."""
  assert program.renewed(text := program.README.read_text()) == text and not pictures.outdated()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_row_has_a_number(path):
  with path.open(newline="") as file:
    found = list(csv.DictReader(file, restkey="more"))
  assert found and tuple(found[0]) == study_rows.COLUMNS
  for row in found:
    assert math.isfinite(float(row["value"])) and row["metric"] and row["study"], row
    assert all("=" in part for part in row["settings"].split("; ") if part), row


def test_all_tables_can_be_made():
  made = {name: markdown.of(table) for name, table in tables.TABLES.items()}
  assert not [name for name, text in made.items() if "|" not in text.split("\n", 2)[2]]


HEAD = "study,model,data,optimizer,settings,budget,seed,metric,value,device,versions,commit,command"
ROWS = """
s,m,d,A,batch=64,,0 1 2,test top-1 mean [%],71.5,,,,
s,m,d,A,batch=64,,0 1 2,test top-1 deviation [%],0.25,,,,
s,m,d,B,batch=64,,0 1 2,test top-1 mean [%],70.25,,,,
s,m,d,B,batch=64,,0 1 2,test top-1 deviation [%],0.25,,,,
s,m,d,B,batch=128,,0,step [ms],1234.5,,,,
s,m,d,B,batch=256,,0,step [ms],1,,,,
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
  (tmp_path / "few.csv").write_text(HEAD + ROWS)
  monkeypatch.setattr(rows, "FOLDER", tmp_path)


def table(**columns):
  lines = {name: {"optimizer": name} for name in "AB"}
  return Table("few", lines, columns, corner="optimizer")


def test_cells(folder):
  accuracy = Column("{test top-1 mean [%]:.1f} ± {test top-1 deviation [%]}", best="highest")
  made = table(top1=accuracy, ms=Column("{step [ms]:,.0f} of {batch}", {"batch": "128"}))
  assert markdown.of(made).splitlines() == [
    "| optimizer | top1 | ms |",
    "| :-- | --: | --: |",
    "| A | **71.5 ± 0.25** | - |",
    "| B | 70.3 ± 0.25 | 1,235 of 128 |",
  ]


def test_two_values_for_a_cell_are_refused(folder):
  with pytest.raises(ValueError, match="several values"):
    markdown.of(table(ms=Column("{step [ms]}")))


def test_leads_that_three_seeds_settle_are_bold(folder):
  """The standard error of the difference is 0.204: 2.776 times that is 0.57."""
  lead = lambda other: Lead("test top-1", "%", {"optimizer": other})
  lines = markdown.of(table(over_a=lead("A"), over_b=lead("B"))).splitlines()
  assert lines[2:] == ["| A | +0.00 | **+1.25** |", "| B | **−1.25** | +0.00 |"]


def test_a_page_is_made_anew_between_its_marks():
  start = "# A\n\n<!-- table: equal_time_1x -->\n"
  text = program.renewed(start + "old\n<!-- end -->\n\nend\n")
  assert text.startswith(start) and text.endswith("\n\n<!-- end -->\n\nend\n")
  assert "old" not in text and "| Muon |" in text and program.renewed(text) == text
