"""The part of a task on text that does not depend on what is learned."""

import functools
from typing import Any, Mapping

import jax
import jax.numpy as jnp
import ml_collections
import optax

from mixer_jax import models, options
from mixer_jax.tasks.task import BaseTask
from mixer_jax.text import text_data


def scores(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Losses [...] in nats of logits [..., n], and whether the likeliest one is the right one."""
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
  return losses, (jnp.argmax(logits, axis=-1) == targets) & jnp.isfinite(losses)


class TextTask(BaseTask):
  """Labels of words or sentences, whose data are options["data"], a kind of `TextData`."""

  likelihood = "categorical"
  layer_kind = staticmethod(models.layer_kind)
  decayed = staticmethod(models.is_decayed)

  def __init__(self, config: ml_collections.ConfigDict):
    self._config, self._data = config, self._data_of(config)

  @classmethod
  def _data_of(cls, config: ml_collections.ConfigDict) -> text_data.TextData:
    return options.made(cls.options["data"], config.data)

  @classmethod
  def check(cls, config: ml_collections.ConfigDict) -> None:
    cls._data_of(config).check()

  @classmethod
  def files(cls, config: ml_collections.ConfigDict) -> Mapping[str, str]:
    return {"data.vocabulary": cls._data_of(config).vocabulary_path}

  @functools.cached_property
  def vocabulary(self) -> Any:
    """A `Vocabulary`, or the kind that the data have; a UserError if the file is none."""
    return text_data.vocabulary(self._data.vocabulary_class, self._data.vocabulary_path)
