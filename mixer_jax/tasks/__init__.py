"""Kinds of tasks: what an example is, what is lost, what is measured."""

from mixer_jax.tasks.metrics import ExpMean, Largest, Metric, RootMeanSquare, WeightedSum
from mixer_jax.tasks.task import TASKS, Aux, BaseTask, Prediction, Task, find
