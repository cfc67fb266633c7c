"""Masked language models, which find hidden words of a text."""

import dataclasses
import functools
from typing import Annotated, Any, Iterable, Mapping, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from mixer_jax import models, options
from mixer_jax.data.dataset import Dataset
from mixer_jax.errors import UserError
from mixer_jax.options import Option
from mixer_jax.runtime import draws
from mixer_jax.tasks.masked_lm import corpus, masking
from mixer_jax.tasks.metrics import ExpMean, Metric, Sums, WeightedSum
from mixer_jax.tasks.task import (
  Aux,
  Batch,
  Prediction,
  ReadRun,
  Variables,
  compiled,
  first_variables,
)
from mixer_jax.tasks.text import encoders, pictures
from mixer_jax.tasks.text.text_task import TextTask, scores

_ANSWERS = 5  # words with the highest probabilities in an answer


@dataclasses.dataclass(frozen=True)
class MaskedLmOptions:
  """Fields of the config itself."""

  mask_rate: Annotated[float, Option("share of tokens to be found", 1e-3, 0.9)] = 0.15
  tied: Annotated[bool, Option("the word embedding is the output matrix, too")] = True
  pretrained: encoders.Pretrained = ""


class MaskedLm(TextTask):
  """Finds words by their context, as BERT does.

  A batch has "ids" int32 [batch, tokens], some of them replaced, and "real" bool [batch, tokens],
  False for padding. The words to be found have "positions" and "targets" int32 and "weights" float32
  [batch, k], see `masking.mask`. Training draws words anew in every step; an evaluation draws them
  by the number of the example, so that it does not depend on the size of a batch.
  """

  options = {"": MaskedLmOptions, "model": models.ENCODERS, "data": corpus.Corpus}
  metrics = (
    Metric("perplexity", higher_is_better=False),
    Metric("loss", higher_is_better=False, unit="nats"),
    Metric("accuracy", higher_is_better=True, percent=True),
  )

  complete = staticmethod(encoders.complete)

  def datasets(self) -> Mapping[str, Dataset]:
    encoders.traced(self._config, self.init)  # finds mistakes in the model before text is read
    return corpus.load(self._data, self.vocabulary)

  @functools.cached_property
  def model(self) -> nn.Module:
    """Maps ids, real tokens and positions to logits [batch, k, entries of the vocabulary]."""
    encoder = encoders.build(self._config.model, self.vocabulary.size, self._data.max_length)
    return models.MaskedLm(encoder, self._config.tied)

  def init(self, key: jax.Array) -> Variables:
    ids = jnp.zeros((1, self._data.max_length), jnp.int32)
    return self.model.init(key, ids, ids == 0, None, ids[:, :1])

  def initial(self, shapes: Variables, read_run: ReadRun) -> Variables | None:
    if not self._config.pretrained:
      return None
    fresh = first_variables(self.init, self._config.seed)
    path, length = self._config.pretrained, self._data.max_length
    given = encoders.read(path, read_run)
    params = encoders.started(fresh["params"], given, encoders.shorter(path, length), path)
    same = "head" in given and jax.tree.map(np.shape, (given["head"], params["head"]))
    if same and same[0] == same[1]:
      params["head"] = given["head"]
    return {"params": params}

  def prepare(self, key: jax.Array, examples: Any, *, train: bool) -> Batch:
    ids, lengths, rows = (examples[name] for name in ("ids", "length", "row"))
    if train:
      keys = jax.random.split(key, len(ids))
    else:
      keys = jax.vmap(functools.partial(jax.random.fold_in, draws.key(0)))(rows)
    real = jnp.arange(ids.shape[1]) < lengths[:, None]
    words = real & (ids != self.vocabulary.cls) & (ids != self.vocabulary.sep)
    own = (self._config.mask_rate, self.vocabulary.mask, self.vocabulary.size)
    return {"real": real, **masking.mask(keys, ids, words, *own)._asdict()}

  def loss(self, variables: Variables, batch: Batch, key: jax.Array) -> tuple[WeightedSum, Aux]:
    inputs = (batch["ids"], batch["real"], None, batch["positions"])
    logits = self.model.apply(variables, *inputs, train=True, rngs={"dropout": key})
    losses, hits = scores(logits, batch["targets"])
    loss = WeightedSum.of(losses, batch["weights"])
    return loss, Aux({"loss": loss, "accuracy": WeightedSum.of(hits, batch["weights"])})

  def predict(self, variables: Variables, batch: Batch) -> Prediction:
    inputs = (batch["ids"], batch["real"], None, batch["positions"])
    logits = self.model.apply(variables, *inputs)
    return Prediction(logits, batch.get("targets"), batch.get("weights"))

  def representations(self, variables: Variables, batch: Batch) -> Mapping[str, jax.Array]:
    """The likeliest words, int32 [batch, k], in place of the logits, and their positions."""
    words = jnp.argmax(self.predict(variables, batch).outputs, axis=-1).astype(jnp.int32)
    return {"outputs": words, "positions": batch["positions"]}

  def evaluate(self, variables: Variables, batch: Batch, mask: jax.Array) -> Mapping[str, Sums]:
    logits, targets, weights, _ = self.predict(variables, batch)
    losses, hits = scores(logits, targets)
    weights = weights * mask[:, None]
    return {
      "perplexity": ExpMean.of(losses, weights),
      "loss": WeightedSum.of(losses, weights),
      "accuracy": WeightedSum.of(hits, weights),
    }

  def answer(self, variables: Variables, inputs: Sequence[str]) -> Iterable[Mapping[str, Any]]:
    """The likeliest words for each [MASK] of a sentence, and the sentence filled with the first."""
    vocabulary, length = self.vocabulary, self._data.max_length
    for number, (sentence, ids) in enumerate(zip(inputs, vocabulary.encode(inputs)), 1):
      ids = np.array([vocabulary.cls, *ids, vocabulary.sep], np.int32)
      hidden = np.flatnonzero(ids == vocabulary.mask)
      if not len(hidden) or len(ids) > length:
        has = f"has {len(ids)} tokens" if len(hidden) else "has no [MASK]"
        allowed = f"a [MASK] or more in at most {length} tokens"
        raise UserError(f"input {number}, {options.shown(sentence)}, {has}; allowed: {allowed}")
      padded = np.full((1, length), vocabulary.pad, np.int32)
      padded[0, : len(ids)] = ids
      batch = {"ids": padded, "real": np.arange(length)[None] < len(ids)}
      # All sentences have as many positions, so that the program is compiled once.
      batch["positions"] = np.resize(hidden, (1, length)).astype(np.int32)
      found = np.asarray(self._probabilities(variables, batch))[0, : len(hidden)]
      best = np.argsort(-found, axis=1, kind="stable")[:, :_ANSWERS]
      words = [{vocabulary.words[i]: float(row[i]) for i in own} for row, own in zip(found, best)]
      ids[hidden] = best[:, 0]
      yield {"text": sentence, "filled": vocabulary.decode(ids[1:-1]), "words": words}

  @compiled
  def _probabilities(self, variables: Variables, batch: Batch) -> jax.Array:
    return jax.nn.softmax(self.predict(variables, batch).outputs)

  def pictures(self, variables: Variables, split: Dataset) -> Mapping[str, Any]:
    batch = jax.tree.map(lambda x: x[:1], split.arrays())
    real = np.arange(self._data.max_length) < batch["length"][:, None]
    inputs = (batch["ids"].astype(np.int32), real, None, np.zeros((1, 1), np.int32))
    tokens = [self.vocabulary.words[i] for i in batch["ids"][0][real[0]]]
    return pictures.of_encoder(self.model, variables, inputs, tokens)
