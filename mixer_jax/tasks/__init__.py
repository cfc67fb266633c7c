"""Kinds of tasks: their examples, losses and metrics."""

from mixer_jax.tasks.metrics import ExpMean, Largest, Metric, RootMeanSquare, WeightedSum
from mixer_jax.tasks.task import TASKS, Aux, BaseTask, Prediction, Task, find
