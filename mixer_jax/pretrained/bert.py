"""BERT's encoder out of Hugging Face's `.safetensors` files.

The names are those of BertModel, BertForMaskedLM and BertForPreTraining of transformers. Pooler and
heads of pretraining are left out.
"""

import json
import logging
import os
import pathlib
import re
from typing import Any, Iterator, NamedTuple

from flax import traverse_util
import jax
import jax.numpy as jnp

from mixer_jax import models
from mixer_jax.errors import UserError, as_user_error
from mixer_jax.pretrained import containers, files, fit
from mixer_jax.pretrained.containers import Arrays

_LOG = logging.getLogger(__name__)

# Modules, theirs and ours.
_EMBEDDINGS = {
  "embeddings.word_embeddings": "words",
  "embeddings.position_embeddings": "positions",
  "embeddings.token_type_embeddings": "segment_types",
  "embeddings.LayerNorm": "embeddings_norm",
}
_BLOCK = {
  "attention.self.query": "attention/query",
  "attention.self.key": "attention/key",
  "attention.self.value": "attention/value",
  "attention.output.dense": "attention/out",
  "attention.output.LayerNorm": "attention_norm",
  "intermediate.dense": "Dense_0",
  "output.dense": "Dense_1",
  "output.LayerNorm": "norm",
}
_THEIRS = {ours: theirs for theirs, ours in (_EMBEDDINGS | _BLOCK).items()}
_LEAVES = {"LayerNorm": "scale", "embeddings": "embedding"}  # of other layers: "kernel"
_OLD = {"gamma": "weight", "beta": "bias"}
_NOT_READ = re.compile(r"(pooler|cls)\.")
_INDICES = ("embeddings.position_ids", "bert.embeddings.position_ids")
_GELUS = {"gelu": "exact", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
_HEAD = 64  # channels


class LoadedBert(NamedTuple):
  """Fields of `models.Bert`, sizes of vocabulary and positions among them, and its parameters."""

  fields: dict[str, Any]
  params: Any

  def model(self, **overrides: Any) -> models.Bert:
    """The encoder; `overrides` replace any field that parameters do not show."""
    return models.Bert(**self.fields | overrides)


def load_bert(source: str | os.PathLike, cache_dir: str = "") -> LoadedBert:
  """Reads an encoder, float32; sizes are those of the arrays.

  Heads, GELU and epsilon are those of a config.json beside the file; without one, there is a head
  to 64 channels, and the others are BERT's. For shorter sequences, see `models.shortened`.

  Args:
    source, cache_dir: as for `pretrained.read`. A download has no config.json.

  Raises:
    UserError: the file is damaged or is no BERT: parameters are missing, left over or of the wrong
      shape (all are named in one message); or the config is of another kind of BERT.
  """
  source = os.fspath(source)
  path, sha256 = files.local(source, cache_dir)
  arrays = dict(_ours(source, containers.read(path, _INDICES)[0]))
  fields = _sizes(source, arrays)
  fields |= _unseen(path.with_name("config.json"), fields["hidden_dim"])
  shapes = _shapes(models.Bert(**fields))
  fit.compare(source, arrays, shapes, _name_in_file)
  count = sum(array.size for array in arrays.values())
  _LOG.info("Read %s: BERT, %d parameters, SHA-256 %s", source, count, sha256)
  return LoadedBert(fields, traverse_util.unflatten_dict(arrays, sep="/"))


def _ours(source: str, arrays: Arrays) -> Iterator[tuple[str, Any]]:
  """Arrays in our names and axes; unknown ones as they are."""
  found = {}
  for name, array in arrays.items():
    own = re.sub(r"(?<=\.)(gamma|beta)$", lambda m: _OLD[m[1]], name.removeprefix("bert."))
    if _NOT_READ.match(own):
      continue
    if own in found:
      raise UserError(f"{source}: {found[own]} and {name} are two names of one parameter")
    found[own] = name
    path = _path(own)
    yield path or name, array.T if path.endswith("/kernel") else array


def _path(name: str) -> str:
  """Our path of "encoder.layer.0.output.dense.weight", or ""."""
  match = re.fullmatch(r"(?:encoder\.layer\.(\d{1,9})\.)?(.+)\.(weight|bias)", name)
  if not match:
    return ""
  number, module, leaf = match.groups()
  ours = _EMBEDDINGS.get(module) if number is None else _BLOCK.get(module)
  if leaf == "weight":
    leaf = next((ours for part, ours in _LEAVES.items() if module.endswith(part)), "kernel")
  block = "" if number is None else f"TransformerBlock_{number}/"
  return f"{block}{ours}/{leaf}" if ours else ""


def _name_in_file(path: str) -> str:
  """Their name of our path, whose block may be "{0-11}"; "" for any other path."""
  match = re.fullmatch(r"(?:TransformerBlock_([^/]+)/)?(.+)/(\w+)", path)
  if not match or match[2] not in _THEIRS:
    return ""
  number, module, leaf = match.groups()
  block = f"encoder.layer.{number}." if number else ""
  kind = "bias" if leaf == "bias" else "weight"
  return f"{block}{_THEIRS[module]}.{kind}{', transposed' if leaf == 'kernel' else ''}"


def _sizes(source: str, arrays: Arrays) -> dict[str, int]:
  """Sizes by the shapes; of a missing matrix any, since it will be missed."""

  def size(path, axis):
    shape = arrays[path].shape if path in arrays else ()
    return shape[axis] if len(shape) == 2 else 1

  if getattr(arrays.get("words/embedding"), "ndim", 0) != 2:
    name = _name_in_file("words/embedding")
    raise UserError(f"{source}: holds no BERT: there is no {name} [vocabulary, channels]")
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
  heads = config.get("num_attention_heads", max(hidden_dim // _HEAD, 1))
  gelu, positions = (
    config.get("hidden_act", "gelu"),
    config.get("position_embedding_type", "absolute"),
  )
  epsilon = config.get("layer_norm_eps", 1e-12)
  if not isinstance(gelu, str) or gelu not in _GELUS:
    raise UserError(f"{path}: hidden_act is {gelu!r}; allowed: {', '.join(_GELUS)}")
  if positions != "absolute":
    raise UserError(f"{path}: position_embedding_type is {positions!r}; allowed: absolute")
  if type(heads) is not int or heads < 1 or hidden_dim % heads:
    raise UserError(f"{path}: num_attention_heads is {heads!r}; allowed: divisors of {hidden_dim}")
  return dict(num_heads=heads, gelu=_GELUS[gelu], layer_norm_epsilon=epsilon)


def _shapes(model: models.Bert) -> dict[str, tuple[int, ...]]:
  ids = jax.ShapeDtypeStruct((1, 1), jnp.int32)
  tree = jax.eval_shape(model.init, jax.random.key(0), ids, ids)["params"]
  return {path: x.shape for path, x in traverse_util.flatten_dict(tree, sep="/").items()}
