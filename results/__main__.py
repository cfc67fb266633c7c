"""Writes the tables and pictures that are made from the rows of this folder.

python -m results           writes those that are outdated
python -m results --check   names them, and fails if there are any
python -m results TABLE     prints a table
"""

import pathlib
import re
import sys

from results import markdown, pictures, tables

ROOT = pathlib.Path(__file__).parent.parent
_TABLE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def page(text: str) -> str:
  """A page with the tables between its markers made anew."""
  made = lambda match: f"{match[1]}\n{markdown.of(tables.TABLES[match[2]])}\n\n{match[3]}"
  return _TABLE.sub(made, text)


def outdated() -> dict[pathlib.Path, str]:
  """The pages whose tables differ from the rows, with their new texts."""
  texts = {path: path.read_text() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))}
  made = {path: page(text) for path, text in texts.items()}
  return {path: text for path, text in made.items() if text != texts[path]}


def main(arguments: list[str]) -> int:
  if arguments and arguments != ["--check"]:
    print(*(markdown.of(tables.TABLES[name]) for name in arguments), sep="\n\n")
    return 0
  pages, drawn = outdated(), pictures.outdated()
  for name in (*(path.relative_to(ROOT) for path in pages), *drawn):
    print(name)
  if arguments:
    return 1 if pages or drawn else 0
  for path, text in pages.items():
    path.write_text(text)
  pictures.draw(drawn)
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
