"""Predictions of a run's checkpoint: for inputs of yours, or for a whole split.

python -m mixer_jax.predict --workdir=DIR cat.jpg dog.png       # a JSON object a line
python -m mixer_jax.predict --workdir=DIR --inputs=FILE         # likewise, an input a line; -: stdin
python -m mixer_jax.predict --workdir=DIR --out=answers.npz functions.npz   # arrays, not JSON
python -m mixer_jax.predict --workdir=DIR --split=test --out=predictions.npz
python -m mixer_jax.predict --workdir=DIR --split=test --out=translations.txt   # of texts

--set=FIELD=VALUE changes a field of the config on which training does not depend, such as `beams`.
"""

import json
import os
import pathlib
import sys
from typing import Any, Callable, Iterable, Mapping, Sequence

from absl import flags
import jax
import numpy as np

from mixer_jax.errors import UserError, as_user_error, until_error
from mixer_jax.experiment import Experiment
from mixer_jax.paths import user_path
from mixer_jax.pretrained import containers
from mixer_jax.runtime import cli
from mixer_jax.tasks import Prediction
from mixer_jax.training.evaluator import each_batch
from mixer_jax.training.restore import load_run, restore


def predict(run: Experiment, variables: Any, split: str = "test") -> Prediction:
  """The prediction for all examples of a split, in its order: [n, ...] arrays."""
  return _of_all(run, variables, split, run.task.predict)


def arrays(run: Experiment, variables: Any, split: str = "test") -> dict[str, np.ndarray]:
  """The parts of the prediction and the task's `representations`, else as `predict`, by name.

  Outputs or targets of several arrays have names such as "outputs/mean" or "outputs/0". Where there
  are any, "paths", texts [n], are the files of the examples below the directory of the set, and
  "class_names", texts [classes], the names of the labels.
  """

  def both(*args):  # in one program: it computes no part that a representation replaces
    parts = run.task.predict(*args)._asdict() | dict(run.task.representations(*args))
    return {name: x for name, x in parts.items() if x is not None}

  found = {
    jax.tree_util.keystr(path, simple=True, separator="/"): x
    for path, x in jax.tree.leaves_with_path(_of_all(run, variables, split, both))
  }
  if (paths := getattr(run.datasets[split], "paths", None)) is not None:
    found["paths"] = np.array([os.fsdecode(path) for path in paths])
  if any(names := [str(name) for name in run.task.class_names]):
    found["class_names"] = np.array(names)
  return found


def _of_all(run: Experiment, variables: Any, split: str, function: Callable) -> Any:
  """`function(variables, batch)` of all examples of a split, without padding."""
  with_mask = lambda variables, batch, mask: (function(variables, batch), mask)
  found = map(jax.device_get, each_batch(run, split, with_mask)(variables))
  whole, keep = jax.tree.map(lambda *x: np.concatenate(x), *found)
  return jax.tree.map(lambda x: x[keep], whole)


def _write_texts(texts: Mapping[str, Sequence[str]], out: str) -> None:
  """Writes the first texts into `out`, others, such as "references", beside it; a line for each."""
  for i, (name, lines) in enumerate(texts.items()):
    path = f"{out.removesuffix('.txt')}.{name}.txt" if i else out
    with as_user_error(f"{path}: cannot be written", OSError):
      whole = "".join(f"{' '.join(line.splitlines())}\n" for line in lines)
      pathlib.Path(path).write_text(whole, encoding="utf-8")
    print(f"{path}: {len(lines):,} {name}")


def write_answers(answers: Iterable[Mapping[str, Any]], out: str) -> None:
  """Writes the numbers and texts of answers to inputs, an array [answers, ...] for each part.

  A UserError of an input, or of an answer of another shape, is raised after the answers before it
  are written.
  """
  answers, refused = until_error(answers)
  rows = list(map(_numbers_and_texts, answers))
  shapes = [{name: x.shape for name, x in row.items()} for row in rows]
  if other := next((i for i, shape in enumerate(shapes) if shape != shapes[0]), 0):
    refused = UserError(
      f"--out takes answers of one shape; answer {other + 1} has {shapes[other]}, those before it,"
      f" which are written, {shapes[0]}"
    )
    rows = rows[:other]
  if rows:
    write_arrays({name: np.stack([row[name] for row in rows]) for name in rows[0]}, out)
  if refused:
    raise refused


def _numbers_and_texts(answer: Mapping[str, Any]) -> dict[str, np.ndarray]:
  """The parts of an answer that are arrays, others left out; a UserError for ragged ones."""
  arrays = {}
  for name, part in answer.items():
    with as_user_error(f"--out takes numbers and texts; {name} is neither", ValueError):
      array = np.asarray(part)
    if array.dtype != object:  # such as the likeliest words with their probabilities
      narrow = array.dtype == np.float64 and not jax.config.jax_enable_x64
      arrays[name] = array.astype(np.float32) if narrow else array
  return arrays


def write_arrays(arrays: Mapping[str, np.ndarray], out: str) -> None:
  """Writes arrays into an `.npz`, which is there whole or as it was before."""
  with as_user_error(f"{out}: cannot be written", OSError):
    containers.write(pathlib.Path(out), arrays, {})
  print(f"{out}: " + ", ".join(f"{k} {list(v.shape)}" for k, v in arrays.items()))


def read_lines(path: str) -> list[str]:
  """The lines of a text file, or of the standard input "-", that are not blank.

  A line on standard error tells how many were blank: they have no answer.
  """
  with as_user_error(f"--inputs={path}", OSError, UnicodeError):
    content = sys.stdin.buffer.read() if path == "-" else user_path(path).read_bytes()
    text = content.decode("utf-8-sig")
  # Not splitlines: it also splits at a lone \r, at form feeds and at Unicode's separators.
  lines = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
  kept = [line for line in lines if line.strip()]
  if not kept:
    raise UserError(f"--inputs={path} has no line that is not blank")
  if blank := len(lines) - len(kept):
    print(f"--inputs={path}: {blank} of {len(lines)} lines are blank: no answer", file=sys.stderr)
  return kept


def main(argv: list[str]) -> None:
  options, path = flags.FLAGS, cli.workdir()
  inputs = argv[1:] + (read_lines(options.inputs) if options.inputs else [])
  out = str(user_path(options.out)) if options.out else ""
  if not inputs and not out:
    raise UserError("predict takes inputs, or --out=FILE.npz for the predictions of --split")
  if out and not out.endswith(".npz" if inputs else (".npz", ".txt")):
    raise UserError(f"--out is {out!r}; arrays are saved as .npz, texts of a split as .txt")
  if not os.path.isdir(os.path.dirname(out) or "."):
    raise UserError(f"--out is {out!r}; there is no folder {os.path.dirname(out)}")
  if inputs and options["split"].present:
    raise UserError(f"--split is {options.split!r}; allowed: inputs or a split, not both")
  chosen = path, options.checkpoint, options.data_dir, options.set
  if inputs:
    answers = load_run(*chosen).answer(inputs)
    if out:
      write_answers(answers, out)
      return
    for answer in answers:
      print(as_line(answer, sys.stdout.encoding or "utf-8"), flush=True)
    return
  run, variables, _ = restore(*chosen)
  if options.split not in run.datasets:
    raise UserError(f"--split is {options.split!r}; allowed: {', '.join(run.datasets)}")
  if out.endswith(".txt"):
    _write_texts(run.task.texts(variables, run.datasets[options.split]), out)
  else:
    write_arrays(arrays(run, variables, options.split), out)


def as_line(answer: Mapping[str, Any], encoding: str) -> str:
  """An answer as JSON; in ASCII if a file's name is no text, or the terminal lacks its letters."""
  line = json.dumps(answer, ensure_ascii=False)
  readable = line.encode(encoding, errors="ignore").decode(encoding) == line
  return line if readable else json.dumps(answer)


if __name__ == "__main__":
  cli.define("workdir", "checkpoint", "data_dir", "set")
  flags.DEFINE_string("inputs", None, "Text file with an input on each line; -: standard input.")
  flags.DEFINE_string("split", "test", "The split that is predicted into --out.")
  flags.DEFINE_string("out", None, "File to write, ending in .npz, or in .txt for texts.")
  cli.run(main, arguments=True)
