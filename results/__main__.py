"""Writes the README's table and the pictures that are made from the rows of this folder.

Those of `docs/` are filled in when the site is built (docs/site.py).

python -m results           writes those that are outdated
python -m results --check   names them, and fails if there are any
python -m results TABLE     prints a table
"""

import pathlib
import re
import sys

from results import markdown, pictures, tables

ROOT = pathlib.Path(__file__).parent.parent
README = ROOT / "README.md"
_TABLE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def renewed(text: str) -> str:
  """A page with the tables between its marks made anew."""
  made = lambda match: f"{match[1]}\n{markdown.of(tables.TABLES[match[2]])}\n\n{match[3]}"
  return _TABLE.sub(made, text)


def main(arguments: list[str]) -> int:
  if arguments and arguments != ["--check"]:
    print(*(markdown.of(tables.TABLES[name]) for name in arguments), sep="\n\n")
    return 0
  before, drawn = README.read_text(), pictures.outdated()
  text = renewed(before)
  outdated = [*([README.name] if text != before else []), *drawn]
  print(*outdated, sep="\n")
  if arguments:
    return 1 if outdated else 0
  README.write_text(text)
  pictures.draw(drawn)
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
