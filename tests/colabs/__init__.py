"""Runs a notebook as a reader does, and hands out its results."""

import json
import os
import pathlib
from typing import Any, Mapping

import nbclient
import nbformat

ROOT = pathlib.Path(__file__).parent.parent.parent
NOTEBOOKS = sorted((ROOT / "colabs").glob("*.ipynb"))


def read(name: str) -> nbformat.NotebookNode:
  return nbformat.read(ROOT / "colabs" / f"{name}.ipynb", as_version=4)


def run(notebook: nbformat.NotebookNode, directory: pathlib.Path) -> None:
  """Executes all cells in a fresh kernel on one CPU device; the outputs go into the notebook.

  Raises:
    nbclient.exceptions.CellExecutionError: a cell failed.
  """
  # As a reader's kernel: without the tests' eight devices, unoptimized programs and threads.
  own = "XLA_FLAGS", "OPENBLAS_NUM_THREADS"
  environment = {k: v for k, v in os.environ.items() if k not in own}
  environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
  client = nbclient.NotebookClient(
    notebook,
    timeout=1800,
    kernel_name="python3",
    coalesce_streams=True,  # or each step of a progress bar is an output
    record_timing=False,
    resources={"metadata": {"path": str(directory)}},
  )
  client.execute(env=environment)


def execute(name: str, directory: pathlib.Path, values: Mapping[str, str]) -> dict[str, Any]:
  """Runs a notebook and evaluates expressions at its end.

  Args:
    name: of the notebook, without its ending.
    directory: where it runs, outside the repository.
    values: expressions over the names that the notebook leaves behind, by key.

  Returns:
    Their values, by the same keys.
  """
  notebook = read(name)
  pairs = ", ".join(f"{key!r}: {expression}" for key, expression in values.items())
  probe = f"import json\nprint('VALUES', json.dumps({{{pairs}}}, default=float))"
  notebook.cells.append(nbformat.v4.new_code_cell(probe))
  run(notebook, directory)
  printed = "".join(o.get("text", "") for o in notebook.cells[-1].outputs)
  return json.loads(printed.partition("VALUES ")[2])
