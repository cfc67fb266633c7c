"""BERT's encoder out of Hugging Face's `.safetensors` files.

The names are those of BertModel, BertForMaskedLM and BertForPreTraining of transformers. Pooler and
heads of pretraining are left out.
"""

import json
import logging
import os
import pathlib
import re
from typing import Any, NamedTuple

from flax import traverse_util
import jax
import jax.numpy as jnp

from mixer_jax import models
from mixer_jax.errors import UserError, as_user_error
from mixer_jax.pretrained import containers, files, fit
from mixer_jax.pretrained.containers import Arrays
from mixer_jax.pretrained.names import TENSORFLOW, Names

_LOG = logging.getLogger(__name__)

_OUTSIDE = {
  "embeddings.word_embeddings": "words",
  "embeddings.position_embeddings": "positions",
  "embeddings.token_type_embeddings": "segment_types",
  "embeddings.LayerNorm": "embeddings_norm",
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


class LoadedBert(NamedTuple):
  """Fields of `models.Bert`, with the sizes of vocabulary and positions, and its parameters."""

  fields: dict[str, Any]
  params: Any

  def model(self, **overrides: Any) -> models.Bert:
    """The encoder; `overrides` replace any field that parameters do not show."""
    return models.Bert(**self.fields | overrides)


def load_bert(source: str | os.PathLike, cache_dir: str = "") -> LoadedBert:
  """Reads an encoder, float32; sizes are those of the arrays.

  Heads, GELU and epsilon are those of a config.json beside the file; without one, heads have 64
  channels and the others are BERT's. For shorter sequences, see `models.shortened`.

  Args:
    source, cache_dir: as for `pretrained.read`. A download has no config.json.

  Raises:
    UserError: the file is damaged or is no BERT: parameters are missing, left over or of the wrong
      shape (one message names them all); or the config is of another kind of BERT.
  """
  source = os.fspath(source)
  path, sha256 = files.local(source, cache_dir)
  found = {k.removeprefix("bert."): x for k, x in containers.read(path)[0].items()}
  arrays = _NAMES.rename({k: x for k, x in found.items() if not re.match(r"(pooler|cls)\.", k)})
  if "words/embedding" not in arrays:
    raise UserError(f"{source}: holds no BERT: there is no {_NAMES.theirs('words/embedding')}")
  fields = _sizes(arrays)
  fields |= _unseen(path.with_name("config.json"), fields["hidden_dim"])
  ids = jax.ShapeDtypeStruct((1, 1), jnp.int32)
  tree = jax.eval_shape(models.Bert(**fields).init, jax.random.key(0), ids, ids)["params"]
  shapes = {name: x.shape for name, x in traverse_util.flatten_dict(tree, sep="/").items()}
  fit.compare(source, arrays, shapes, _NAMES.theirs)
  count = sum(array.size for array in arrays.values())
  _LOG.info("Read %s: BERT, %d parameters, SHA-256 %s", source, count, sha256)
  return LoadedBert(fields, traverse_util.unflatten_dict(arrays, sep="/"))


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


def _unseen(path: pathlib.Path, hidden_dim: int) -> dict[str, Any]:
  """Fields that parameters do not show."""
  config: dict[str, Any] = {}
  if path.is_file():
    with as_user_error(f"{path}: is no config of BERT"):
      config = dict(json.loads(path.read_text()))
  gelu = config.get("hidden_act", "gelu")
  positions = config.get("position_embedding_type", "absolute")
  if gelu not in _GELUS:
    raise UserError(f"{path}: hidden_act is {gelu!r}; allowed: {', '.join(_GELUS)}")
  if positions != "absolute":
    raise UserError(f"{path}: position_embedding_type is {positions!r}; allowed: absolute")
  heads = config.get("num_attention_heads", max(hidden_dim // _HEAD, 1))
  epsilon = config.get("layer_norm_eps", 1e-12)
  return dict(num_heads=heads, gelu=_GELUS[gelu], layer_norm_epsilon=epsilon)
