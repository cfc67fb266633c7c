"""Classification of sentences and pairs of them, from scratch or from a trained encoder."""

import dataclasses
import functools
import itertools
import json
from typing import Annotated, Any, Callable, Iterable, Mapping, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from mixer_jax import models, options
from mixer_jax.data.dataset import Dataset
from mixer_jax.errors import UserError, check_list, until_error
from mixer_jax.models import text_heads
from mixer_jax.options import Option, one_of
from mixer_jax.tasks import labels as labels_lib
from mixer_jax.tasks.metrics import ClassMeans, Metric, Sums, WeightedSum
from mixer_jax.tasks.task import (
  Aux,
  Batch,
  Prediction,
  ReadRun,
  Variables,
  first_variables,
  in_batches,
  likeliest,
)
from mixer_jax.tasks.text import encoders, pictures
from mixer_jax.tasks.text.text_task import TextTask
from mixer_jax.tasks.text.text_task import scores as token_scores
from mixer_jax.tasks.text_classification import scores
from mixer_jax.text import labelled, sample, sequences

_FROZEN = 'run or BERT\'s weights whose outputs are the input of the model, not trained; "": none'
_SAMPLE_COLUMNS = (sample.TEXT, "", sample.LABEL)
_FILLED_IN = "description of that encoder: filled in"


@dataclasses.dataclass(frozen=True)
class ClassificationOptions:
  """Fields of the config itself."""

  pooling: one_of(
    "what the head sees: the first token, [CLS]; the mean of all; or BERT's pooler of the first",
    text_heads.POOLINGS,
  ) = "mean"
  head_dropout: Annotated[float, Option("dropout before the head", 0, 0.999)] = 0.0
  class_weight: labels_lib.ClassWeight = ""
  pretrained: encoders.Pretrained = ""
  frozen_from: Annotated[str, Option(_FROZEN)] = ""
  frozen: Annotated[str | None, Option(_FILLED_IN)] = None


class TextClassification(TextTask):
  """Softmax classification of text.

  A batch has "ids" and "segments" int32 [batch, tokens], "real" bool [batch, tokens] and "label"
  int32 [batch]; with `class_weight` one for training also the "weight" of each class, float32 [batch],
  by which the mean of the losses is weighted. GLUE's scores beside accuracy: F1 of the second class and Matthews' correlation,
  where there are two classes.
  """

  options = {"": ClassificationOptions, "model": models.ENCODERS, "data": labelled.LabelledText}
  metrics = (
    Metric("accuracy", higher_is_better=True, percent=True),
    Metric("loss", higher_is_better=False, unit="nats"),
    Metric("f1", higher_is_better=True, percent=True),
    Metric("matthews", higher_is_better=True, percent=True),
  )

  def __init__(self, config: ml_collections.ConfigDict):
    super().__init__(config)
    self._segments = 2 if self._data.pair else 0

  @classmethod
  def check(cls, config: ml_collections.ConfigDict) -> None:
    super().check(config)
    data = cls._data_of(config)
    columns = data.text, data.pair, data.label
    named = f"data.text, data.pair and data.label are {', '.join(map(repr, columns))}"
    given = [column for column in columns if column]
    if not (data.text and data.label) or len({*given}) < len(given):
      raise UserError(f"{named}; allowed: different columns; pair may be ''")
    if data.name == "sample" and columns != _SAMPLE_COLUMNS:
      own = ", ".join(map(repr, _SAMPLE_COLUMNS))
      raise UserError(f"{named}; allowed with data.name='sample': {own}")
    labels_lib.check_weight(config.class_weight)
    if config.pretrained and config.frozen_from:
      why = "the model that reads a frozen encoder's outputs has no words of its own"
      raise UserError(f"pretrained is {config.pretrained!r} and frozen_from is set, but {why}")

  @classmethod
  def complete(cls, config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    config = encoders.complete(config).copy_and_resolve_references()
    if config.frozen_from:
      given = encoders.describe(config.frozen_from)
      config = encoders.with_vocabulary(config, given, config.frozen_from)
      config.frozen = json.dumps(given._replace(vocabulary=""))
    return config

  def datasets(self) -> Mapping[str, Dataset]:
    return self._loaded.splits

  @functools.cached_property
  def _loaded(self) -> labelled.Loaded:
    encoders.traced(self._config, lambda key: self._fresh(self._build(2), key))
    return labelled.load(self._data, self.vocabulary)

  @functools.cached_property
  def class_names(self) -> tuple[str, ...]:
    return self._loaded.class_names

  @functools.cached_property
  def model(self) -> nn.Module:
    """The model; it maps ids, real tokens, segments and maybe features to logits [batch, classes]."""
    return self._build(len(self.class_names))

  def _build(self, num_classes: int) -> nn.Module:
    size, length = self.vocabulary.size, self._data.max_length
    width = self._frozen.hidden_dim if self._frozen else 0
    own = (self._config.model, size, length, self._segments)
    encoder = encoders.build(*own, features_dim=width)
    config = self._config
    return models.TextClassifier(encoder, num_classes, config.pooling, config.head_dropout)

  @functools.cached_property
  def _frozen(self) -> nn.Module | None:
    """The encoder that is not trained; its parameters are the collection "frozen"."""
    if not self._config.frozen:
      return None
    described = encoders.Described(*json.loads(self._config.frozen))
    if (length := self._data.max_length) > described.max_length:
      most = f"at most {described.max_length} of {self._config.frozen_from!r}"
      raise UserError(f"data.max_length is {length}; allowed: {most}")
    fields = dict(vocab_size=self.vocabulary.size, max_length=length, segments=described.segments)
    return models.encoder(described.name, **fields, **described.fields)

  def _fresh(self, model: nn.Module, key: jax.Array) -> Variables:
    ids = jnp.zeros((1, self._data.max_length), jnp.int32)
    batch, frozen = {"ids": ids, "real": ids == 0, "segments": ids}, {}
    if self._frozen:
      frozen = {"frozen": self._frozen.init(key, ids, ids == 0, self._seen(ids))["params"]}
    return {**model.init(key, *self._inputs(frozen, batch)), **frozen}

  def _seen(self, segments: jax.Array) -> jax.Array | None:
    """The segments, where the frozen encoder knows them."""
    return segments if self._frozen.segments else None

  def _inputs(self, variables: Variables, batch: Batch) -> tuple[Any, ...]:
    features, segments = None, batch["segments"]
    if self._frozen:
      inputs = (batch["ids"], batch["real"], self._seen(segments))
      features = jax.lax.stop_gradient(self._frozen.apply({"params": variables["frozen"]}, *inputs))
    return batch["ids"], batch["real"], segments if self._segments else None, features

  def init(self, key: jax.Array) -> Variables:
    return self._fresh(self.model, key)

  def initial(self, shapes: Variables, read_run: ReadRun) -> Variables | None:
    config, length = self._config, self._data.max_length
    if not (path := config.pretrained or config.frozen_from):
      return None
    fresh = first_variables(self.init, config.seed)
    own = bool(config.pretrained) and config.pooling == "pooler"
    given, length = encoders.read(path, read_run, own), encoders.shorter(path, length)
    if not config.pretrained:
      frozen = encoders.started({"encoder": fresh["frozen"]}, given, length, path)
      return {**fresh, "frozen": frozen["encoder"]}
    params = encoders.started(fresh["params"], given, length, path)
    if own:
      params = encoders.with_classifier(params, given, self.class_names, path)
    return {**fresh, "params": params}

  def prepare(self, key: jax.Array, examples: Any, *, train: bool) -> Batch:
    ids = examples["ids"].astype(jnp.int32)
    real = jnp.arange(ids.shape[1]) < examples["length"][:, None]
    segments = jnp.arange(ids.shape[1]) >= examples["segment_start"][:, None]
    parts = {"ids": ids, "real": real, "segments": segments.astype(jnp.int32)}
    batch = {**parts, "label": examples["label"]}
    if train and self._class_weights is not None:
      batch["weight"] = jnp.asarray(self._class_weights)[batch["label"]]
    return batch

  @functools.cached_property
  def _class_weights(self) -> np.ndarray | None:
    given, labels = self._config.class_weight, lambda: self._labels
    return labels_lib.weights_of_labels(given, self.class_names, labels)

  @property
  def _labels(self) -> np.ndarray:
    return labels_lib.of_examples(self._loaded.splits["train"])

  def sampled_labels(self) -> np.ndarray | None:
    return self._labels if self._data.sampling == "class" else None

  def loss(self, variables: Variables, batch: Batch, key: jax.Array) -> tuple[WeightedSum, Aux]:
    inputs, params = self._inputs(variables, batch), {"params": variables["params"]}
    logits = self.model.apply(params, *inputs, train=True, rngs={"dropout": key})
    losses, hits = token_scores(logits, batch["label"])
    loss = WeightedSum.of(losses, batch.get("weight"))
    return loss, Aux({"loss": loss, "accuracy": WeightedSum.of(hits)})

  def predict(self, variables: Variables, batch: Batch) -> Prediction:
    return self._predict(self.model, variables, batch)

  def _predict(self, model: nn.Module, variables: Variables, batch: Batch) -> Prediction:
    inputs = self._inputs(variables, batch)
    logits = model.apply({"params": variables["params"]}, *inputs)
    return Prediction(logits, batch.get("label"), batch.get("weight"), tokens=batch["real"])

  def evaluate(self, variables: Variables, batch: Batch, mask: jax.Array) -> Mapping[str, Sums]:
    logits, labels, *_ = self.predict(variables, batch)
    losses, hits = token_scores(logits, labels)
    sums = {"accuracy": WeightedSum.of(hits, mask), "loss": WeightedSum.of(losses, mask)}
    sums["balanced_accuracy"] = ClassMeans.of_labels(hits, labels, logits.shape[1], mask)
    if logits.shape[1] > 2:
      return sums
    return sums | scores.of_two(jnp.argmax(logits, axis=1) == 1, labels == 1, mask)

  def curvature_view(self) -> Callable[[Variables, Batch], Prediction]:
    return functools.partial(self._predict, self.model)

  def answer(self, variables: Variables, inputs: Sequence[str]) -> Iterable[Mapping[str, Any]]:
    """The class of each sentence; of a pair the two sentences are apart by a tab.

    The answers before a refused sentence come first.
    """
    check_list(inputs, "sentences")
    pairs, refused = until_error(itertools.starmap(self._parts, enumerate(inputs, 1)))
    if pairs:
      texts, seconds = [part[0] for part in pairs], [part[-1] for part in pairs]
      seconds = seconds if self._segments else None
      tokens, cut = sequences.pairs(texts, seconds, self.vocabulary, self._data.max_length)
      labelled.warn_of_cut(cut, len(pairs), "inputs", self._data.max_length)
      for sentence, row in zip(inputs, self._probabilities(variables, tokens)):
        yield {"text": sentence} | likeliest(row, self.class_names)
    if refused:
      raise refused

  def _parts(self, number: int, sentence: str) -> list[str]:
    """The sentence, or the two of a pair."""
    parts = sentence.split("\t")
    if len(parts) != (2 if self._segments else 1) or not all(part.strip() for part in parts):
      pair = "two sentences with a tab between"
      allowed = pair if self._segments else "a sentence, without a tab"
      raise UserError(f"input {number} is {options.shown(sentence)}; allowed: {allowed}")
    return parts

  def _probabilities(self, variables: Variables, tokens: Mapping[str, np.ndarray]) -> np.ndarray:
    found = functools.partial(self._softmax, variables)
    return in_batches(found, tokens, self._config.eval_batch_size)

  @functools.cached_property
  def _softmax(self) -> Callable[[Variables, Any], jax.Array]:
    def softmax(variables, examples):
      examples = {**examples, "label": jnp.zeros(len(examples["ids"]), jnp.int32)}
      batch = self.prepare(None, examples, train=False)
      return jax.nn.softmax(self.predict(variables, batch).outputs)

    return jax.jit(softmax)

  def pictures(self, variables: Variables, split: Dataset) -> Mapping[str, Any]:
    examples = jax.tree.map(lambda x: x[:1], split.arrays())
    batch = self.prepare(None, examples, train=False)
    tokens = [self.vocabulary.words[i] for i in examples["ids"][0][: examples["length"][0]]]
    params = {"params": variables["params"]}
    return pictures.of_encoder(self.model, params, self._inputs(variables, batch), tokens)
