"""Predictions of a run's checkpoint: for inputs of yours, or for a whole split.

python -m mixer_jax.predict --workdir=DIR cat.jpg dog.png       # a JSON object a line
python -m mixer_jax.predict --workdir=DIR --split=test --out=predictions.npz
"""

import json
from typing import Any

from absl import flags
import jax
import numpy as np

from mixer_jax.errors import UserError, told
from mixer_jax.experiment import Experiment
from mixer_jax.runtime import cli
from mixer_jax.training.evaluator import each_batch
from mixer_jax.training.restore import restore


def predict(run: Experiment, variables: Any, split: str = "test") -> tuple[Any, Any]:
  """Outputs and targets of all examples of a split, in its order: [n, ...] arrays."""

  def outputs_and_targets(variables, batch, mask):
    prediction = run.task.predict(variables, batch)
    return prediction.outputs, prediction.targets, mask

  found = map(jax.device_get, each_batch(run, split, outputs_and_targets)(variables))
  *arrays, keep = (jax.tree.map(lambda *x: np.concatenate(x), *parts) for parts in zip(*found))
  return tuple(jax.tree.map(lambda x: x[keep], tree) for tree in arrays)


def main(argv: list[str]) -> None:
  options, path = flags.FLAGS, cli.workdir()
  if bool(argv[1:]) == bool(options.out):
    raise UserError("predict takes inputs, or --out=FILE.npz for the predictions of --split")
  run, variables, _ = restore(path, options.checkpoint, options.data_dir)
  if argv[1:]:
    for answer in run.task.answer(variables, argv[1:]):
      print(json.dumps(answer), flush=True)
    return
  if options.split not in run.datasets:
    raise UserError(f"--split is {options.split!r}; allowed: {', '.join(run.datasets)}")
  outputs, targets = predict(run, variables, options.split)
  with told(f"{options.out}: cannot be written", OSError):
    np.savez(options.out, outputs=outputs, targets=targets)
  print(f"{options.out}: outputs {list(outputs.shape)}, targets {list(targets.shape)}")


if __name__ == "__main__":
  cli.define("workdir", "checkpoint", "data_dir")
  flags.DEFINE_string("split", "test", "The split that is predicted into --out.")
  flags.DEFINE_string("out", None, "File to write, ending in .npz.")
  cli.run(main, arguments=True)
