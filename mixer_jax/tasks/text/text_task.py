"""The part of a task on text that does not depend on what is learned."""

import functools
from typing import Any, Mapping

import ml_collections

from mixer_jax import models, options
from mixer_jax.tasks.task import BaseTask
from mixer_jax.tasks.text import text_data


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
