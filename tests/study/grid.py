"""Studies that are cheap to plan; no net is ever trained in them."""

import dataclasses
from typing import Annotated

from mixer_jax import config as config_lib
from mixer_jax import tasks
from mixer_jax.options import Option


def tiny(model, optimizer):
  """A config that is cheap to make; nothing trains it."""
  config = config_lib.default()
  config.num_epochs = 3
  config.model.num_blocks = int(model[1:])
  config.optimizer = config_lib.optimizer(optimizer, learning_rate=0.1)
  config.target = 0.5
  return config


GRID = dict(title="t", config=tiny, axes={"model": ("m1", "m2"), "optimizer": ("sgd", "adam")})


@dataclasses.dataclass
class Points:
  fold: Annotated[str, Option("part that is tested")] = "test"


class Errors(tasks.BaseTask):
  """A task without images, whose metric is better if lower."""

  options = {"points": Points}
  metrics = (tasks.Metric("error", higher_is_better=False, unit="m"),)
  likelihood = "normal"


def errors(optimizer):
  """A config counted in steps."""
  config = config_lib.default("tests.study.grid:Errors")
  config.num_steps = 30
  config.target = 0.02
  config.optimizer = config_lib.optimizer(optimizer, learning_rate=0.1)
  return config
