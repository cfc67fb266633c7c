"""BERT's encoder out of Hugging Face's files, and the head of a fine-tuned one.

The names are those of BertModel and of its models with heads in transformers. Pooler and classifier
of BertForSequenceClassification are read; other heads are left out, and the log names them.
"""

import logging
import os
import pathlib
import re
from typing import Any, Mapping, NamedTuple

from flax import traverse_util
import jax
import jax.numpy as jnp

from mixer_jax import models
from mixer_jax.errors import UserError
from mixer_jax.pretrained import containers, files, fit
from mixer_jax.pretrained.containers import Arrays
from mixer_jax.pretrained.names import TENSORFLOW, Names, unwrapped

_LOG = logging.getLogger(__name__)

_OUTSIDE = {
  "embeddings.word_embeddings": "words",
  "embeddings.position_embeddings": "positions",
  "embeddings.token_type_embeddings": "segment_types",
  "embeddings.LayerNorm": "embeddings_norm",
  "pooler.dense": "pooler",
  "classifier": "classifier",
}
_INSIDE = {
  "attention.self.query": "attention/query",
  "attention.self.key": "attention/key",
  "attention.self.value": "attention/value",
  "attention.output.dense": "attention/out",
  "attention.output.LayerNorm": "attention_norm",
  "intermediate.dense": "Dense_0",
  "output.dense": "Dense_1",
  "output.LayerNorm": "norm",
}
_NAMES = Names("encoder.layer.{}.", "TransformerBlock", _OUTSIDE, _INSIDE, TENSORFLOW)
_GELUS = {"gelu": "exact", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
_HEAD = 64  # channels
_SIGN = r"(bert\.)?embeddings\.word_embeddings\."
_BESIDE = re.compile(r"(cls|qa_outputs|classifier|pooler)\.")  # of the encoder
_HEADS = [f"{k}.{leaf}" for k in ("pooler.dense", "classifier") for leaf in ("weight", "bias")]
# Fields of a config.json and ours, which the arrays show as well.
_SHOWN = dict(hidden_size="hidden_dim", num_hidden_layers="num_blocks", intermediate_size="ffn_dim")
_SHOWN |= dict(vocab_size="vocab_size", max_position_embeddings="max_length")
_SHOWN |= dict(type_vocab_size="segments")


class LoadedBert(NamedTuple):
  """What `load_bert` returns.

  Attributes:
    fields: fields of `models.Bert`, with the sizes of vocabulary and positions.
    params: the encoder's parameters.
    heads: "pooler" and "classifier", a kernel and a bias each, as far as the file has both.
    class_names: names of the classifier's outputs, in their order; () if the config tells none.
  """

  fields: dict[str, Any]
  params: Any
  heads: dict[str, Any] = {}
  class_names: tuple[str, ...] = ()

  def model(self, **overrides: Any) -> models.Bert:
    """Builds the encoder.

    Args:
      **overrides: values of fields that parameters do not show, such as `dropout_rate` and `dtype`.

    Returns:
      A `models.Bert`.

    Example:
      After the example of `load_bert`:

      ```python
      model = bert.model(dropout_rate=0.0)
      ```
    """
    return models.Bert(**self.fields | overrides)


def load_bert(source: str | os.PathLike, cache_dir: str = "") -> LoadedBert:
  """Reads the encoder of a BERT of Hugging Face, float32; sizes are those of the arrays.

  Heads, GELU and epsilon are those of a config.json beside the file; without one, heads have 64
  channels and the others are BERT's. For shorter sequences, see `models.shortened`.

  Args:
    source: a path, or an address to download; a download has no config.json.
    cache_dir: where downloads are kept; "": ~/.cache/mixer_jax/weights.

  Returns:
    A `LoadedBert`.

  Raises:
    UserError: the file is damaged or is no BERT: parameters are missing, left over or of the wrong
      shape (one message names them all); or the config is of another model or of other sizes.

  Example:
    With the folder of a model of Hugging Face, such as google/bert_uncased_L-4_H-256_A-4:

    ```python
    from mixer_jax import pretrained

    bert = pretrained.load_bert("bert_mini/model.safetensors")
    print(bert.fields["num_blocks"], bert.class_names)
    ```
  """
  source = os.fspath(source)
  path, sha256 = files.local(source, cache_dir)
  config, where = files.config_beside(path), path.with_name("config.json")
  _check_kind(config, where)
  encoder, heads = _parts(source, unwrapped(source, containers.read(path)[0], [_SIGN]))
  if "words/embedding" not in encoder:
    raise UserError(f"{source}: holds no BERT: there is no {_NAMES.theirs('words/embedding')}")
  fields = _sizes(encoder)
  fields |= _unseen(config, where, fields["hidden_dim"])
  ids = jax.ShapeDtypeStruct((1, 1), jnp.int32)
  tree = jax.eval_shape(models.Bert(**fields).init, jax.random.key(0), ids, ids)["params"]
  flat: dict[str, Any] = traverse_util.flatten_dict(tree, sep="/")
  shapes = {name: x.shape for name, x in flat.items()}
  fit.compare(source, encoder, shapes, _NAMES.theirs)
  for name, own in _SHOWN.items():
    if config.get(name, fields[own]) != fields[own]:
      raise UserError(f"{where}: {name} is {config[name]!r}, but {source} has {fields[own]}")
  if not encoder["positions/embedding"][:2].any(axis=1).all():  # where no config says so
    why = "one of the first positions is all zeros, for padding, as in RoBERTa"
    raise UserError(f"{source}: {why}; allowed: BERT, whose positions begin with 0")
  count = sum(array.size for array in encoder.values())
  _LOG.info("Read %s: BERT, %d parameters, SHA-256 %s", source, count, sha256)
  params, others = (traverse_util.unflatten_dict(x, sep="/") for x in (encoder, heads))
  return LoadedBert(fields, params, others, _class_names(config))


def _parts(source: str, found: Arrays) -> tuple[Arrays, Arrays]:
  """The arrays of the encoder, and those of pooler and classifier; the log names the others."""
  prefix = "bert." if any(name.startswith("bert.") for name in found) else ""
  outside = [k for k in found if not k.startswith(prefix) or _BESIDE.match(k, len(prefix))]
  encoder = {k.removeprefix(prefix): x for k, x in found.items() if k not in outside}
  heads = {k.removeprefix(prefix): found[k] for k in outside}
  # Without a pooler a classifier is one of tokens.
  wanted = _HEADS if "pooler.dense.weight" in heads else ()
  if left := [name for name in heads if name not in wanted]:
    _LOG.info("%s: left out %s", source, containers.listed(left))
  return _NAMES.rename(encoder), _NAMES.rename({k: heads[k] for k in wanted if k in heads})


def _class_names(config: Mapping[str, Any]) -> tuple[str, ...]:
  """The names of a classifier's outputs; () if they are the numbered ones of transformers."""
  found = {int(number): name for number, name in (config.get("id2label") or {}).items()}
  names = tuple(found[number] for number in sorted(found))
  return () if all(re.fullmatch(r"LABEL_\d+", name) for name in names) else names


def _sizes(arrays: Arrays) -> dict[str, Any]:
  """Fields that the shapes show; 1 for a missing matrix, which the comparison names."""
  size = lambda path, axis: arrays[path].shape[axis] if path in arrays else 1
  numbers = {m[1] for path in arrays if (m := re.match(r"TransformerBlock_(\d+)/", path))}
  return dict(
    vocab_size=size("words/embedding", 0),
    hidden_dim=size("words/embedding", 1),
    max_length=size("positions/embedding", 0),
    segments=size("segment_types/embedding", 0),
    num_blocks=len(numbers),
    ffn_dim=size("TransformerBlock_0/Dense_0/kernel", 1),
  )


def _check_kind(config: Mapping[str, Any], where: pathlib.Path) -> None:
  """Raises a UserError if a config is of a model that is computed otherwise than `models.Bert`."""
  for name, *allowed in (
    ("model_type", "bert"),
    ("is_decoder", False),
    ("hidden_act", *_GELUS),
    ("position_embedding_type", "absolute"),
  ):
    if config.get(name, allowed[0]) not in allowed:
      listed = ", ".join(map(str, allowed))
      raise UserError(f"{where}: {name} is {config[name]!r}; allowed: {listed}")


def _unseen(config: Mapping[str, Any], where: pathlib.Path, hidden_dim: int) -> dict[str, Any]:
  """Fields that parameters do not show."""
  heads = config.get("num_attention_heads", max(hidden_dim // _HEAD, 1))
  if hidden_dim % heads:
    raise UserError(f"{where}: num_attention_heads is {heads}, no divisor of {hidden_dim} channels")
  gelu, epsilon = _GELUS[config.get("hidden_act", "gelu")], config.get("layer_norm_eps", 1e-12)
  return dict(num_heads=heads, gelu=gelu, layer_norm_epsilon=epsilon)
