"""Encoders of text: built from a config, and started from a run or from BERT's weights."""

from typing import Annotated, Any, Callable, Mapping, NamedTuple

from flax import traverse_util
import flax.linen as nn
import jax
import ml_collections

from mixer_jax import models, options
from mixer_jax.errors import UserError, as_user_error
from mixer_jax.options import Option
from mixer_jax.paths import remembered, user_path
from mixer_jax.pretrained import bert, fit
from mixer_jax.rundir import directory
from mixer_jax.tasks.task import ReadRun

_START = 'run on text, or BERT\'s weights (.safetensors), to start from; "": none'
Pretrained = Annotated[str, Option(_START)]
_SEGMENTS, _WORDS = "segment_types/embedding", "words/embedding"
_LAYOUT = ("scan_blocks", "remat", "dtype")  # no properties of weights


# Describing an encoder and starting from it are two calls: the file is read once.
_bert = remembered(bert.load_bert)


class Described(NamedTuple):
  """The description of a trained encoder: all that builds it."""

  name: str
  fields: Mapping[str, Any]  # of `models.ENCODERS[name]`
  max_length: int
  segments: int
  vocabulary: str = ""  # path of its run's copy; "": it has none


def build(
  group: ml_collections.ConfigDict, vocab_size: int, max_length: int, segments: int = 0, **own: Any
) -> nn.Module:
  """The encoder of `config.model`; `own` are further fields."""
  fields = dict(vocab_size=vocab_size, max_length=max_length, segments=segments) | own
  return models.encoder(group.name, **fields, **options.given(group))


def describe(path: str) -> Described:
  """The encoder of a run, or of a file of BERT's weights; a UserError if there is none."""
  if path.endswith(".safetensors"):
    fields = dict(_bert(path).fields)
    fields.pop("vocab_size")
    return Described("bert_base", fields, fields.pop("max_length"), fields.pop("segments"))
  where = user_path(path)
  if (weights := where / "model.safetensors").exists():
    raise UserError(f"{path!r} is a folder of weights; take {str(weights)!r}")
  config = directory.read_config(where)
  with as_user_error(f"{path!r} is no run on text", LookupError, TypeError):
    name, data = config["model"]["name"], config["data"]
    own = {k: v for k, v in config["model"].items() if v is not None and k != "name"}
    fields = {k: x.default for k, x in options.of(models.ENCODERS[name]).items()} | own
    segments = 2 * bool(data.get("pair"))
    return Described(name, fields, data["max_length"], segments, data.get("vocabulary") or "")


def read(path: str, read_run: ReadRun) -> Mapping[str, Any]:
  """{"encoder": the parameters of the same encoder}, and maybe those of a head, on the host."""
  if path.endswith(".safetensors"):
    return {"encoder": _bert(path).params}
  config, variables = read_run(path)
  if "encoder" not in variables["params"]:
    raise UserError(f"{path!r} is a run of task {config.task}, which has no encoder of text")
  return variables["params"]


def shorter(path: str, max_length: int) -> int | None:
  """The length of a model's sequences, if it is not that of a trained encoder; see `started`."""
  return None if describe(path).max_length == max_length else max_length


def complete(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
  """The config with the fields of the model and the vocabulary that `pretrained` fixes."""
  if not config.pretrained:
    return config
  config, given = config.copy_and_resolve_references(), describe(config.pretrained)
  options.chosen(config.model, models.ENCODERS, "model")
  if models.ENCODERS[config.model.name].func is not models.ENCODERS[given.name].func:
    what = f"pretrained {config.pretrained!r} is a {given.name}"
    raise UserError(f"model.name is {config.model.name!r}, but {what}; set it so")
  for name, value in given.fields.items():
    if name not in _LAYOUT and name in config.model and config.model[name] is None:
      config.model[name] = value
  return with_vocabulary(config, given, config.pretrained)


def with_vocabulary(
  config: ml_collections.ConfigDict, given: Described, path: str
) -> ml_collections.ConfigDict:
  """The config with the vocabulary of a trained encoder, which must not be another one."""
  if not given.vocabulary:
    return config
  own, content = config.data.vocabulary, lambda p: user_path(p).read_bytes()
  with as_user_error(f"data.vocabulary is {own!r}", OSError):
    if own and content(own) != content(given.vocabulary):
      raise UserError(f"data.vocabulary is {own!r}, not that of {path!r}; leave it out")
  config.data.vocabulary = given.vocabulary
  return config


def started(
  fresh: Mapping[str, Any], given: Mapping[str, Any], shorten: int | None, source: str
) -> dict[str, Any]:
  """Fresh parameters with a trained encoder in the place of theirs.

  Segments that only one of both knows are fresh, or the first of them is added to all words. A
  UserError names all parameters that are missing, left over, or of another shape.

  Args:
    shorten: length of the sequences of the model, if it is not that of the trained encoder.
    source: the trained encoder's path, for messages.
  """
  flat = lambda tree: traverse_util.flatten_dict(models.unrolled(dict(tree)), sep="/")
  encoder = given["encoder"]
  trained, wanted = (
    flat(models.shortened(encoder, shorten) if shorten else encoder),
    flat(fresh["encoder"]),
  )
  if _SEGMENTS not in trained and _SEGMENTS in wanted:
    trained[_SEGMENTS] = wanted[_SEGMENTS]
  elif {_SEGMENTS, _WORDS} <= trained.keys() and _SEGMENTS not in wanted:
    first = trained.pop(_SEGMENTS)[0]  # that of every token of a single sentence
    trained[_WORDS] = trained[_WORDS] + first
  fit.compare(source, trained, {path: x.shape for path, x in wanted.items()}, lambda path: "")
  own = traverse_util.unflatten_dict(trained, sep="/")
  scanned = jax.tree.structure(own) != jax.tree.structure(dict(fresh["encoder"]))
  return {**fresh, "encoder": models.stacked(own) if scanned else own}


def traced(config: ml_collections.ConfigDict, init: Callable[[jax.Array], Any]) -> None:
  """Traces the start of the model, so that a mistake in its fields is a UserError."""
  with as_user_error(f"model {config.model.name}", ValueError):
    jax.eval_shape(init, jax.random.key(0))
