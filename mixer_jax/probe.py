"""k-NN and linear evaluation of the features of a run's checkpoint, or of its untrained network.

python -m mixer_jax.probe --workdir=DIR [--checkpoint=latest|best|STEP] [--split=test] [--untrained]
    [--neighbours=20] [--temperature=0.07] [--train_images=N] [--nolinear]

The run is one of a task with images, labels and features, such as image_classification or
self_distillation. Features are those of whole images, without augmentation.
"""

from typing import Any

from absl import flags
import jax
import numpy as np

from mixer_jax import options as options_lib
from mixer_jax.errors import UserError
from mixer_jax.experiment import Experiment
from mixer_jax.runtime import cli, compilation
from mixer_jax.runtime import mesh as mesh_lib
from mixer_jax.tasks import task as task_lib
from mixer_jax.tasks.images import batches, probes
from mixer_jax.training.evaluator import each_batch
from mixer_jax.training.restore import restore

# Flags by the fields of `probes.Knn`.
_KNN = {"neighbours": "neighbours", "temperature": "temperature", "images": "train_images"}


def probe(
  path: str,
  which: str = "latest",
  data_dir: str | None = None,
  split: str = "test",
  untrained: bool = False,
  how: probes.Knn = probes.Knn(),
  with_linear: bool = True,
) -> dict[str, float]:
  """Accuracies on a split of "knn" and "linear", with the "decay" of the latter and "held_out".

  Args:
    path: a run.
    which: a checkpoint, see `restore`.
    data_dir: where the data are now.
    split: the test set; the classifiers learn from "train".
    untrained: take the parameters that the run's seed starts with instead.
    how: of k-NN; `how.images` holds for the linear classifier, too.
    with_linear: False: k-NN alone.

  Raises:
    UserError: no such run, checkpoint or split, or a task without features or labels.
  """
  restored = restore(path, which, data_dir)
  run, variables = restored.run, restored.variables
  if split not in run.datasets or split == "train":
    tested = ", ".join(name for name in run.datasets if name != "train")
    raise UserError(
      f"--split is {split!r}; allowed: {tested}, for the classifiers learn from train"
    )
  if untrained:
    variables = _fresh(run)
  features, labels = _labelled(run, variables, "train", how.images)
  queries, wanted = _labelled(run, variables, split)
  state = "untrained" if untrained else restored.place
  print(
    f"{path} {state}: {len(labels):,} training images, {features.shape[1]} features", flush=True
  )
  classes = 1 + int(max(labels.max(), wanted.max()))
  accuracy = lambda found: float(np.mean(found == wanted))
  scores = {"knn": accuracy(probes.knn(features, labels, queries, how, classes))}
  if with_linear:
    fitted = probes.linear(features, labels, classes)
    scores |= dict(linear=accuracy(fitted(queries)), decay=fitted.decay, held_out=fitted.held_out)
  return scores


def _fresh(run: Experiment) -> Any:
  """The variables before step 0 of a run that starts from no weights."""
  key, _ = task_lib.seed_keys(run.config.seed)
  return jax.jit(run.task.init, out_shardings=mesh_lib.replicated(run.mesh))(key)


def _labelled(
  run: Experiment, variables: Any, split: str, most: int = 0
) -> tuple[np.ndarray, np.ndarray]:
  """Features [n, d] and labels [n] of a split, or of so many examples, evenly spaced."""

  def pair(variables, batch, mask):
    features = run.task.representations(variables, batch).get("features")
    if features is None or not isinstance(batch, dict) or "label" not in batch:
      raise UserError(f"task {run.config.task} has no features of images with labels to probe")
    if batch["label"].ndim > 1:
      raise UserError(f"split {split!r} has sets of classes; probes take one class an image")
    return features, batch["label"], mask

  rows = batches.spaced(run.datasets[split], most)
  found = map(jax.device_get, each_batch(run, split, pair, rows)(variables))
  features, labels, keep = (np.concatenate(x) for x in zip(*found))
  return features[keep], labels[keep]


def main(_: list[str]) -> None:
  options, path = flags.FLAGS, cli.workdir()
  compilation.keep_in(options.compilation_cache)
  given = {field: options[flag].value for field, flag in _KNN.items()}
  for field, flag in _KNN.items():
    options_lib.of(probes.Knn)[field].check(f"--{flag}", given[field])
  how = probes.Knn(**given)
  where = (path, options.checkpoint, options.data_dir, options.split, options.untrained)
  found = probe(*where, how, options.linear)
  line = f"{options.split}  knn {found['knn']:.2%}"
  if options.linear:
    line += f"  linear {found['linear']:.2%} (weight decay {found['decay']:g}, which a tenth of"
    line += f" train picked with {found['held_out']:.2%})"
  print(line)


if __name__ == "__main__":
  cli.define("workdir", "checkpoint", "data_dir", "compilation_cache")
  flags.DEFINE_string("split", "test", "The split that is classified; the classifiers see train.")
  flags.DEFINE_bool("untrained", False, "Take a random network of the run's seed, to compare.")
  flags.DEFINE_integer("neighbours", 20, "Training images that vote.")
  flags.DEFINE_float("temperature", 0.07, "Divides the similarities of neighbours.")
  flags.DEFINE_integer("train_images", 0, "Training images, evenly spaced; 0: all.")
  flags.DEFINE_bool("linear", True, "Fit the linear classifier, too.")
  cli.run(main)
