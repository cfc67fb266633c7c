"""Encoders of text: built from a config, and started from a run or from BERT's weights."""

import functools
import json
import pathlib
from typing import Annotated, Any, Callable, Mapping, NamedTuple

import flax.linen as nn
import jax
import ml_collections

from mixer_jax import models, options
from mixer_jax.errors import UserError, told
from mixer_jax.options import Option
from mixer_jax.pretrained import bert
from mixer_jax.tasks.task import Batch, Prediction, ReadRun, Variables

_START = 'run on text, or BERT\'s weights (.safetensors), to start from; "": none'
Pretrained = Annotated[str, Option(_START)]


# Describing an encoder and starting from it are two calls: the file is read once.
_bert = functools.lru_cache(maxsize=1)(bert.load_bert)


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
  where = pathlib.Path(path).expanduser()
  with told(f"{path!r} is no run on text and no .safetensors file", OSError, ValueError, KeyError):
    config = json.loads((where / "config.json").read_text())
    model, data = dict(config["model"]), config["data"]
    fields = {k: v for k, v in model.items() if v is not None and k != "name"}
    copies = [str(p.absolute()) for p in (where / "files").glob("data.vocabulary*")]
    segments = int(bool(data.get("pair"))) * 2
    return Described(model["name"], fields, data["max_length"], segments, *copies[:1])


def read(path: str, read_run: ReadRun) -> Mapping[str, Any]:
  """{"encoder": the parameters of the same encoder}, and maybe those of a head, on the host."""
  if path.endswith(".safetensors"):
    return {"encoder": _bert(path).params}
  config, variables = read_run(path)
  if "encoder" not in variables["params"]:
    raise UserError(f"{path!r} is a run of task {config.task}, which has no encoder of text")
  return variables["params"]


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
    if name in config.model and config.model[name] is None:
      config.model[name] = value
  return with_vocabulary(config, given, config.pretrained)


def with_vocabulary(
  config: ml_collections.ConfigDict, given: Described, path: str
) -> ml_collections.ConfigDict:
  """The config with the vocabulary of a trained encoder, which must not be another one."""
  if not given.vocabulary:
    return config
  own, content = config.data.vocabulary, lambda p: pathlib.Path(p).expanduser().read_bytes()
  with told(f"data.vocabulary is {own!r}", OSError):
    if own and content(own) != content(given.vocabulary):
      raise UserError(f"data.vocabulary is {own!r}, not that of {path!r}; leave it out")
  config.data.vocabulary = given.vocabulary
  return config


def started(fresh: Mapping[str, Any], given: Mapping[str, Any], max_length: int) -> dict[str, Any]:
  """Fresh parameters, the encoder's (and where it fits the head's) replaced by trained ones.

  Segments that the trained encoder does not know stay fresh. A UserError if another parameter is
  missing, or has another shape.
  """
  encoder = models.shortened(given["encoder"], max_length)
  own = dict(fresh["encoder"])
  for name, value in own.items():
    if name in encoder:
      own[name] = _fitting(value, encoder[name], name)
    elif name != "segment_types":
      raise UserError(f"pretrained has no parameter encoder/{name}")
  heads = {k: given[k] for k in fresh if k in given and k != "encoder"}
  same = lambda a, b: jax.tree.map(lambda x: x.shape, a) == jax.tree.map(lambda x: x.shape, b)
  heads = {k: head for k, head in heads.items() if same(head, fresh[k])}
  return {**fresh, "encoder": own, **heads}


def _fitting(fresh: Any, given: Any, name: str) -> Any:
  if not isinstance(fresh, Mapping) or not isinstance(given, Mapping):
    shapes = getattr(given, "shape", None), getattr(fresh, "shape", None)
    if shapes[0] != shapes[1]:
      raise UserError(f"pretrained encoder/{name} is {shapes[0]}, the model wants {shapes[1]}")
    return given
  if fresh.keys() != given.keys():
    found, wanted = ", ".join(sorted(given)), ", ".join(sorted(fresh))
    raise UserError(f"pretrained encoder/{name} has {found}; the model wants {wanted}")
  return {k: _fitting(x, given[k], f"{name}/{k}") for k, x in fresh.items()}


def traced(config: ml_collections.ConfigDict, init: Callable[[jax.Array], Any]) -> None:
  """Tells a mistake in the fields of the model, by tracing its start."""
  with told(f"model {config.model.name}", ValueError):
    jax.eval_shape(init, jax.random.key(0))


def curvature_view(
  model: nn.Module, predict: Callable[[nn.Module, Variables, Batch], Prediction]
) -> tuple[Callable[[Variables, Batch], Prediction], Any]:
  """A task's `curvature_view` of a model with a field `encoder`."""
  encoder = model.encoder.clone(scan_blocks=False, remat=False, parent=None)
  apart = functools.partial(predict, model.clone(encoder=encoder))
  if not model.encoder.scan_blocks:
    return apart, None
  from mixer_jax.optim import Layout  # of all optimizers' code only K-FAC's needs it

  return apart, Layout(models.unrolled, models.stacked)
