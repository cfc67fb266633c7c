"""Translation: all-MLP encoders and decoders beside the Transformer's."""

import dataclasses
import functools
from typing import Annotated, Any, Iterable, Mapping, NamedTuple, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from mixer_jax import models, options
from mixer_jax.data.dataset import Dataset
from mixer_jax.errors import UserError
from mixer_jax.models import decoding
from mixer_jax.options import Option, one_of
from mixer_jax.runtime import mesh as mesh_lib
from mixer_jax.tasks.metrics import Metric, Sums, WeightedSum
from mixer_jax.tasks.task import Aux, Batch, Prediction, Variables, answered
from mixer_jax.tasks.text import encoders
from mixer_jax.tasks.text.text_task import TextTask
from mixer_jax.tasks.translation import aligned, bleu, pictures

_TOGETHER = 32  # batches of inputs sorted by length together
_BEAMS = "hypotheses of the beam search of `predict`; 1: greedy"


@dataclasses.dataclass(frozen=True)
class TranslationOptions:
  """Fields of the config itself."""

  label_smoothing: Annotated[float, Option("share of all tokens in the target", 0, 0.9)] = 0.1
  beams: Annotated[int, Option(_BEAMS, 1, 1000, free=True)] = 4
  eval_beams: Annotated[int, Option("beams of evaluations; 1: greedy", 1, 1000)] = 1
  length_penalty: Annotated[float, Option("alpha of GNMT's length penalty", 0, 10, free=True)] = 0.6
  bleu_tokenizer: one_of("words of sacrebleu, by its names", bleu.TOKENIZERS) = "13a"


class Found(NamedTuple):
  """Translations in the order of their sources, and log-probabilities over length penalties."""

  texts: list[str]
  scores: np.ndarray


class Translation(TextTask):
  """Translates sentences token by token, learned by teacher forcing.

  A batch has "source" int32 and "source_mask" bool [batch, n], "inputs" and "targets" int32 and
  "weights" bool [batch, m]. Input t is target t - 1, input 0 is `bos`; weights are False for padding.
  """

  options = {
    "": TranslationOptions,
    "model": models.TRANSLATORS,
    "data": aligned.AlignedText,
  }
  metrics = (
    Metric("bleu", higher_is_better=True),
    Metric("loss", higher_is_better=False, unit="nats"),
    Metric("accuracy", higher_is_better=True, percent=True),
  )

  @functools.cached_property
  def _special(self) -> decoding.Special:
    return decoding.Special(*(getattr(self.vocabulary, k) for k in decoding.Special._fields))

  def datasets(self) -> Mapping[str, Dataset]:
    print(f"BLEU is {self.notes()['bleu']}", flush=True)  # needs sacrebleu before text is read
    encoders.traced(self._config, self.init)
    return aligned.load(self._data, self.vocabulary)

  @functools.cached_property
  def model(self) -> nn.Module:
    """Maps sources and the targets before to logits [batch, m, entries of the vocabulary]."""
    sizes = dict(vocab_size=self.vocabulary.size, max_length=self._data.max_length)
    config = self._config.model
    return models.translator(config.name, **sizes, **options.given(config))

  def init(self, key: jax.Array) -> Variables:
    ids = jnp.zeros((1, 2), jnp.int32)
    return self.model.init(key, ids, ids == 0, ids, ids == 0)

  def prepare(self, key: jax.Array, examples: Any, *, train: bool) -> Batch:
    source, targets = (examples[side].astype(jnp.int32) for side in ("source", "target"))
    real = lambda ids, side: jnp.arange(ids.shape[1]) < examples[f"{side}_length"][:, None]
    inputs = jnp.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=self.vocabulary.bos)
    sources = {"source": source, "source_mask": real(source, "source")}
    return {**sources, "inputs": inputs, "targets": targets, "weights": real(targets, "target")}

  def _logits(self, variables: Variables, batch: Batch, **how: Any) -> jax.Array:
    inputs = (batch[name] for name in ("source", "source_mask", "inputs", "weights"))
    return self.model.apply({"params": variables["params"]}, *inputs, **how)

  def loss(self, variables: Variables, batch: Batch, key: jax.Array) -> tuple[WeightedSum, Aux]:
    """Cross-entropy with label smoothing (Szegedy et al., 2016)."""
    logits = self._logits(variables, batch, train=True, rngs={"dropout": key})
    log_probs, smoothing = nn.log_softmax(logits), self._config.label_smoothing
    losses, sums = _scores(log_probs, batch)
    smooth = (1 - smoothing) * losses - smoothing * jnp.mean(log_probs, axis=-1)
    return WeightedSum.of(smooth, batch["weights"]), Aux(sums)

  def predict(self, variables: Variables, batch: Batch) -> Prediction:
    return Prediction(self._logits(variables, batch), batch["targets"], batch["weights"])

  def representations(self, variables: Variables, batch: Batch) -> Mapping[str, jax.Array]:
    """The likeliest next words, "outputs" int32 [batch, m], in place of the logits of all words."""
    outputs = jnp.argmax(self._logits(variables, batch), axis=-1)
    return {"outputs": outputs.astype(jnp.int32)}

  def evaluate(self, variables: Variables, batch: Batch, mask: jax.Array) -> Mapping[str, Sums]:
    own = {**batch, "weights": batch["weights"] & mask[:, None]}
    return _scores(nn.log_softmax(self._logits(variables, batch)), own)[1]

  def translated(
    self, variables: Variables, source: np.ndarray, lengths: np.ndarray, beams: int
  ) -> Found:
    """Translates sources [n, tokens] that end with `eos` and have these lengths.

    Sentences of about one length are translated together, until the last of them ends. A batch is
    split over the devices of this process; each process translates all.
    """
    number, width = source.shape
    params, mesh = mesh_lib.of_process({"params": variables["params"]})
    size = -(-min(self._config.eval_batch_size, number) // mesh.size) * mesh.size
    order = np.argsort(lengths, kind="stable")
    texts, scores = [""] * number, np.zeros(number)
    how = dict(length=self._data.max_length, special=self._special, beams=beams, mesh=mesh)
    for start in range(0, number, size):
      rows = order[start : start + size]
      padded = np.resize(rows, size)
      mask = np.arange(width) < lengths[padded, None]
      ids = np.asarray(source[padded], np.int32)
      best = decoding.translate(
        self.model, params, ids, mask, alpha=self._config.length_penalty, **how
      )
      found = zip(rows, np.asarray(best.ids[:, 0]), np.asarray(best.scores[:, 0]))
      for row, own, score in found:
        texts[row] = " ".join(self.vocabulary.decode(own).splitlines())
        scores[row] = score
    return Found(texts, scores)

  def _scored(
    self, variables: Variables, split: aligned.Translated, beams: int
  ) -> tuple[list[str], bleu.Bleu]:
    """The translations of a test set, and their BLEU."""
    arrays = split.arrays()
    found = self.translated(variables, arrays["source"], arrays["source_length"], beams).texts
    return found, bleu.corpus(found, split.references, self._config.bleu_tokenizer)

  def notes(self) -> Mapping[str, str]:
    return {"bleu": bleu.corpus(["a"], ["a"], self._config.bleu_tokenizer).signature}

  def host_metrics(self, variables: Variables, split: Dataset) -> Mapping[str, float]:
    """BLEU of a test set; the training set has no references."""
    if not isinstance(split, aligned.Translated):
      return {}
    return {"bleu": self._scored(variables, split, self._config.eval_beams)[1].score}

  def texts(self, variables: Variables, split: Dataset) -> Mapping[str, Sequence[str]]:
    """Translations of a test set by beam search, and their references; prints their BLEU."""
    if not isinstance(split, aligned.Translated):
      raise UserError("the training set keeps no references; translate another split")
    found, (score, signature) = self._scored(variables, split, self._config.beams)
    print(f"BLEU {score:.2f} with {self._config.beams} beams ({signature})")
    return {"translations": found, "references": split.references}

  def answer(self, variables: Variables, inputs: Sequence[str]) -> Iterable[Mapping[str, Any]]:
    """The translation of each sentence, with its log-probability over the length penalty."""

    def translations(encoded):
      lengths = np.array([len(ids) for ids in encoded])
      source = np.full((len(encoded), self._data.max_length), self.vocabulary.pad, np.int32)
      for row, ids in zip(source, encoded):
        row[: len(ids)] = ids
      return zip(*self.translated(variables, source, lengths, self._config.beams))

    size = _TOGETHER * self._config.eval_batch_size
    for text, (found, score) in answered(inputs, size, self._encoded, translations):
      yield {"text": text, "translation": found, "score": float(score)}

  def _encoded(self, text: str) -> list[int]:
    """The tokens of a sentence with its end; a UserError if there are none or too many."""
    [ids], longest = self.vocabulary.encode([text.strip()]), self._data.max_length - 1
    if not 0 < len(ids) <= longest:
      has = f"{options.shown(text)} has {len(ids)} tokens"
      raise UserError(f"the input {has}; allowed: 1 to {longest}")
    return [*ids, self.vocabulary.eos]

  def pictures(self, variables: Variables, split: Dataset) -> Mapping[str, Any]:
    """Matrices over tokens, and the cross-attention of the first sentence."""
    batch = self.prepare(None, jax.tree.map(lambda x: x[:1], split.arrays()), train=False)
    words = lambda ids, mask: self.vocabulary.tokens(np.asarray(ids[0])[np.asarray(mask[0])])
    sources = words(batch["source"], batch["source_mask"])
    targets = words(batch["targets"], batch["weights"])
    cut = {"source": len(sources), "source_mask": len(sources)}
    alone = {name: x[:, : cut.get(name, len(targets))] for name, x in batch.items()}
    found = pictures.attention_maps(self._logits, self.model.num_heads, variables, alone)
    return pictures.drawn(variables["params"], found, sources, targets)


def _scores(log_probs: jax.Array, batch: Batch) -> tuple[jax.Array, dict[str, Sums]]:
  """Losses in nats [batch, m], and their sum and that of hits over the real tokens."""
  targets, weights = batch["targets"], batch["weights"]
  losses = -jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]
  hits = (jnp.argmax(log_probs, axis=-1) == targets) & jnp.isfinite(losses)
  return losses, {
    "loss": WeightedSum.of(losses, weights),
    "accuracy": WeightedSum.of(hits, weights),
  }
