"""Exact metrics of a run's checkpoint on its test sets.

python -m mixer_jax.evaluate --workdir=DIR [--checkpoint=latest|best|STEP|mean:N] [--split=NAME]
    [--test_sets=NAME=PLACE,...] [--test_labels=NAME=FILE.json,...] [--set=FIELD=VALUE ...] [--per_class]
"""

from typing import Sequence

from absl import flags

from mixer_jax.errors import UserError
from mixer_jax.runtime import cli, compilation
from mixer_jax.training.evaluator import evaluators
from mixer_jax.training.restore import restore


def evaluate(
  path: str,
  which: str | int = "latest",
  data_dir: str | None = None,
  split: str | None = None,
  overrides: Sequence[str] | str = (),
  per_class: bool = False,
  **data: str | None,
) -> dict[str, dict[str, float]]:
  """Metrics of a checkpoint by split, equal to those that training logged.

  They are of one split, or of all but the training set; for the rest see `restore`. With `per_class`
  accuracy, or intersection over union, of each class stands beside its mean over the classes.
  """
  restored = restore(path, which, data_dir, overrides, **data)
  run = restored.run
  if split and split not in run.datasets:
    raise UserError(f"--split is {split!r}; allowed: {', '.join(run.datasets)}")
  scorers = evaluators(run, [split] if split else ())
  print(f"{path} {restored.place}")
  return {name: scorer(restored.variables, per_class) for name, scorer in scorers.items()}


def main(_: list[str]) -> None:
  options, path = flags.FLAGS, cli.workdir()
  compilation.keep_in(options.compilation_cache)
  further = dict(test_sets=options.test_sets, test_labels=options.test_labels)
  found = evaluate(
    *(path, options.checkpoint, options.data_dir, options.split, options.set, options.per_class),
    **further,
  )
  for split, metrics in found.items():
    each = {name: value for name, value in metrics.items() if "/" in name}
    own = (f"{name} {value:.6g}" for name, value in metrics.items() if name not in each)
    print("  ".join([split, *own]))
    for name, value in each.items():
      print(f"{split}  {name} {value:.6g}")


if __name__ == "__main__":
  cli.define("workdir", "checkpoint", "data_dir", "set", "compilation_cache")
  flags.DEFINE_string("test_sets", None, "Further test sets, in the place of data.test_sets.")
  flags.DEFINE_string("test_labels", None, "Their labels, in the place of data.test_labels.")
  flags.DEFINE_bool("per_class", False, "Also the accuracy, or IoU, of each class.")
  flags.DEFINE_string("split", None, "One of the run's splits; default: all test sets.")
  cli.run(main)
