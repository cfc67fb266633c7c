"""The picture of a run's curves."""

import math
import pathlib

from mixer_jax import workdir
from mixer_jax.errors import UserError
from mixer_jax.report import figures

_PANELS = (
  ("loss", "loss (nats)", ("train/loss", "test/loss")),
  ("accuracy", "accuracy", ("train/accuracy", "test/top1")),
  ("learning rate", "learning rate", ("learning_rate",)),
)


def draw(directory: pathlib.Path) -> pathlib.Path:
  """Draws loss, accuracy and learning rate over epochs to `curves.png`.

  Raises:
    UserError: the run has no metrics yet.
  """
  rows = workdir.read_metrics(directory)
  if not rows:
    raise UserError(f"{directory} holds no metrics (no lines in {workdir.METRICS})")
  figure, axes = figures.panels(1, len(_PANELS), (13, 3.8))
  epochs = [row["epoch"] for row in rows]
  for axis, (title, label, names) in zip(axes[0], _PANELS):
    for name in names:
      axis.plot(
        epochs,
        [row.get(name, math.nan) for row in rows],
        marker="." if len(rows) < 30 else "",
        label=name,
      )
    axis.set(title=title, xlabel="epoch", ylabel=label)
    axis.grid(alpha=0.3)
    axis.legend()
  config = workdir.load_config(directory)
  figure.suptitle(f"{config.model.name}, {config.data.name}, {config.optimizer.name}")
  return figures.save(figure, directory / "curves.png")
