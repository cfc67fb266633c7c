"""Facts that a family of models states about itself, and fields that the families share."""

import dataclasses
import functools
import re
from typing import Annotated, Any, Callable, Mapping

import flax.linen as nn

from mixer_jax import options
from mixer_jax.models import layers
from mixer_jax.options import Option

# Larger values are mistakes, and would take hours or all memory to fail.
SIDE = 2**14  # of an image, in pixels
WIDTH = 10**6  # of a layer
_DEPTH = 1000  # blocks
_HIGHEST_RATE = 0.999


def one_of(text: str, choices: tuple[str, ...]) -> Any:
  """The type of an option that takes names."""
  return Annotated[str, Option(text, choices=choices)]


PatchSize = Annotated[int, Option("side of a square patch in pixels", 1, SIDE)]
HiddenDim = Annotated[int, Option("channels of a token", 1, WIDTH)]
NumBlocks = Annotated[int, Option("number of blocks", 0, _DEPTH)]
MlpDim = Annotated[int, Option("hidden width of the MLP over channels", 1, WIDTH)]
DropoutRate = Annotated[float, Option("dropout in the MLPs", 0, _HIGHEST_RATE)]
StochasticDepth = Annotated[
  float, Option("drop rate of residual branches, for whole examples", 0, _HIGHEST_RATE)
]
Gelu = one_of('"tanh" as in Google\'s code, "exact" as in timm', layers.GELUS)
LayerNormEpsilon = Annotated[float, Option("epsilon of LayerNorm", 0)]
_REMAT = "compute each block again in the backward pass: saves memory (on a CPU if scanned)"
Remat = Annotated[bool, Option(_REMAT, free=True)]
ScanBlocks = Annotated[bool, Option("loop over one program of a block: compiles faster")]
Dtype = one_of("of the computation; parameters are float32", ("float32", "bfloat16"))

LAYER_KINDS = ("stem", "token_mixing", "channel_mixing", "norms", "head")


@dataclasses.dataclass(frozen=True)
class Layer:
  """The role of a layer.

  Attributes:
    kind: one of `LAYER_KINDS`.
    token_axes: meaning of the axes of a kernel over tokens: "in" and "out" (tokens) or
      "hidden"; () if there are none, or if they fit any number of tokens. A bias has
      the last axis.
  """

  kind: str
  token_axes: tuple[str, ...] = ()


STEM, HEAD, NORM = Layer("stem"), Layer("head"), Layer("norms")
TOKENS, CHANNELS = Layer("token_mixing"), Layer("channel_mixing")
TOKENS_IN = Layer("token_mixing", ("in", "hidden"))
TOKENS_OUT = Layer("token_mixing", ("hidden", "out"))
TOKENS_SQUARE = Layer("token_mixing", ("in", "out"))


@dataclasses.dataclass(frozen=True)
class Family:
  """A family of models.

  Attributes:
    variants: models by name, ready but for `num_classes`.
    layers: roles by path, without the numbers of blocks: "MixerBlock/LayerNorm_0". A
      role holds for the layers below, unless they have one of their own.
    image_sizes: side in pixels of the images that a variant is meant for, where it is
      not 224.
    decayed: names of parameters that weight decay of "kernels" acts on.
  """

  variants: Mapping[str, Callable[..., Any]]
  layers: Mapping[str, Layer]
  image_sizes: Mapping[str, int]
  decayed: tuple[str, ...] = ("kernel",)


def variants(cls: type, fields: Mapping[str, Mapping[str, Any]]) -> dict[str, Callable[..., Any]]:
  """The models of a class by name, from the values of their fields."""
  return {name: functools.partial(cls, **values) for name, values in fields.items()}


def role(table: Mapping[str, Layer], path: str) -> Layer | None:
  """The role of the layer that a parameter belongs to, or None.

  Args:
    table: see `Family.layers`.
    path: of the parameter, as "MixerBlock_0/LayerNorm_0/scale" or, of scanned blocks,
      "MixerBlocks/LayerNorm_0/scale".
  """
  path = re.sub(r"^(\w+Block)(s|_\d+)/", r"\1/", path)
  while "/" in path:
    path = path.rpartition("/")[0]
    if path in table:
      return table[path]
  return None


def check(module: nn.Module) -> None:
  """Raises a UserError for a field of a module with another value than its option allows."""
  for name, option in options.of(type(module)).items():
    option.check(f"model.{name}", getattr(module, name))


class Model(nn.Module):
  """A module whose options `check` sees, since some wrong names would mean another model."""

  def __post_init__(self):
    check(self)
    super().__post_init__()
