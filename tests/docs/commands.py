"""The commands of the documents, as a shell would run them.

A block of commands is a fence without a language (or `sh`), or four spaces of indentation, whose
first word is a command. A comment before a block that a test here cannot run says so:

  <!-- runs: gpu, network -->

The needs are those of `NEEDS`. Commands in the running text, in backticks, are checked, not run.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parent.parent.parent
PAGES = (
  *("README.md", "CONTRIBUTING.md", "results/README.md"),
  *sorted(f"docs/{p.name}" for p in ROOT.glob("docs/*.md")),
)
# gpu: hours on a CPU; network: downloads; long: hours anywhere; suite: the tests themselves.
NEEDS = ("gpu", "network", "long", "suite")
# Pages, and a section of the others, whose commands made the numbers around them: each takes hours.
MEASURED = "\n## Measured\n"
MEASUREMENTS = ("docs/results.md", "docs/studies.md")

_STARTS = ("python ", "pip ", "pytest ", "ruff ", "for ", "git ")
_FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?<=\n\n)(?:    .*\n)+")
_MARK = re.compile(r"<!-- runs: (?P<needs>[a-z, ]+) -->\s*\Z")
_INLINE = re.compile(r"`((?:python -m|python \w|pytest) ?[^`]+)`")


class Block(NamedTuple):
  """Commands that belong together."""

  page: str  # the document, as "docs/studies.md"
  text: str  # the commands
  needs: tuple[str, ...]  # of `NEEDS`, beside a CPU


def blocks(page: str) -> list[Block]:
  """The blocks of commands of a page, in its order."""
  text = (ROOT / page).read_text()
  found = [(m.start(), m["text"]) for m in _FENCE.finditer(text) if m["language"] in ("", "sh")]
  without_fences = _FENCE.sub(lambda m: " " * len(m[0]), text)
  found += [
    (m.start(), re.sub(r"^    ", "", m[0], flags=re.MULTILINE))
    for m in _INDENTED.finditer(without_fences)
  ]
  chosen = [(start, block) for start, block in sorted(found) if block.startswith(_STARTS)]
  return [Block(page, block, _needs(page, text[:start])) for start, block in chosen]


def _needs(page: str, before: str) -> tuple[str, ...]:
  if page in MEASUREMENTS or MEASURED in before:
    return ("long",)
  marked = _MARK.search(before)
  needs = tuple(n.strip() for n in marked["needs"].split(",")) if marked else ()
  assert set(needs) <= set(NEEDS), f"{page}: the mark {marked and marked[0]} is none of {NEEDS}"
  return needs


def inline(page: str) -> list[Block]:
  """The commands in a page's running text."""
  text = _FENCE.sub("", (ROOT / page).read_text())
  return [Block(page, " ".join(m[1].split()), ("text",)) for m in _INLINE.finditer(text)]


def snippets(page: str) -> list[str]:
  """The Python of a page, a fence each."""
  text = (ROOT / page).read_text()
  return [m["text"] for m in _FENCE.finditer(text) if m["language"] == "python"]


_RECORD = f"""#!{sys.executable}
import json, os, sys
with open(os.environ["RECORD"], "a") as file:
  file.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + "\\n")
"""


def arguments(block: Block, directory: pathlib.Path) -> list[list[str]]:
  """The commands of a block word by word, its loops and quotes worked off by bash.

  Programs are stood in for by ones that write down how they were called.

  Args:
    block: of a page.
    directory: an empty one, to run in.

  Raises:
    CalledProcessError: bash does not understand it.
  """
  stubs, record = directory / "stubs", directory / "record"
  stubs.mkdir()
  for name in ("python", "pip", "pytest", "ruff", "pyright", "git"):
    (stubs / name).write_text(_RECORD)
    (stubs / name).chmod(0o755)
  record.touch()
  activate = directory / ".venv" / "bin" / "activate"  # which a command reads
  activate.parent.mkdir(parents=True)
  activate.touch()
  environment = os.environ | {"PATH": f"{stubs}:{os.environ['PATH']}", "RECORD": str(record)}
  subprocess.run(
    ["bash", "-euo", "pipefail", "-c", block.text],
    cwd=directory,
    env=environment,
    check=True,
    timeout=60,
  )
  return [json.loads(line) for line in record.read_text().splitlines()]
