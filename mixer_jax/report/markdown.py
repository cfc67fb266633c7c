"""Tables in Markdown."""

import itertools
from typing import Any, Iterable, Iterator, Sequence


# Ours and not `pandas.to_markdown`, which needs two libraries more for these lines, and escapes
# nothing: the cells are texts by then.
def table(header: Sequence[str], rows: Iterable[Iterable[Any]], words: int = 1) -> Iterator[str]:
  """The lines of a table; the first `words` columns are text, the others numbers."""
  rule = [":--"] * words + ["--:"] * (len(header) - words)
  for line in itertools.chain((header, rule), rows):  # rows may take their time
    yield f"| {' | '.join(escaped(str(cell)) for cell in line)} |"


def escaped(text: str) -> str:
  """A cell as it is to be read: a bar would begin another cell."""
  return text.replace("|", "\\|")
