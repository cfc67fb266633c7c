"""Executes notebooks and keeps their outputs: `python -m tests.colabs [NAME ...]`."""

import pathlib
import sys
import tempfile

import nbformat

from tests.colabs import NOTEBOOKS, ROOT, read, run


def _clean(text: str, directory: str) -> str:
  """Colab's directory stands for the one that it ran in."""
  return text.replace(directory, "/content")


def refresh(name: str) -> None:
  notebook = read(name)
  with tempfile.TemporaryDirectory() as directory:
    run(notebook, pathlib.Path(directory))
  for cell in notebook.cells:
    if cell.cell_type != "code":
      continue
    cell.outputs = [o for o in cell.outputs if o.output_type != "stream" or o.text.strip()]
    for output in cell.outputs:
      if output.output_type == "stream":
        output.text = _clean(output.text, directory)
  notebook.metadata.language_info = {"name": "python"}
  nbformat.write(notebook, ROOT / "colabs" / f"{name}.ipynb")


if __name__ == "__main__":
  for name in sys.argv[1:] or [path.stem for path in NOTEBOOKS]:
    refresh(name)
    print(name)
