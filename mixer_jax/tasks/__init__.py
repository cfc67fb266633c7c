"""Kinds of tasks: their examples, losses and metrics."""

from mixer_jax.tasks.metrics import ExpMean, Largest, Metric, RootMeanSquare, WeightedSum
from mixer_jax.tasks.task import TASKS, Aux, BaseTask, Prediction, Task, find

__all__ = (
  "TASKS",
  "Aux",
  "BaseTask",
  "ExpMean",
  "Largest",
  "Metric",
  "Prediction",
  "RootMeanSquare",
  "Task",
  "WeightedSum",
  "find",
)
