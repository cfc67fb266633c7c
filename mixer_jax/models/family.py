"""Facts that a family of models states about itself, and the model that the families share."""

import dataclasses
import functools
import re
from typing import Annotated, Any, Callable, Mapping

import flax.linen as nn
import jax

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


# Fields that not all families have, or with other defaults.
MlpDim = Annotated[int, Option("hidden width of the MLP over channels", 1, WIDTH)]
DropoutRate = Annotated[float, Option("dropout in the MLPs", 0, _HIGHEST_RATE)]
Gelu = one_of('"tanh" as in Google\'s code, "exact" as in timm', layers.GELUS)
_REMAT = "compute each block again in the backward pass: saves memory (on a CPU if scanned)"
_Dtype = one_of("of the computation; parameters are float32", ("float32", "bfloat16"))


def check(module: nn.Module) -> None:
  """Raises a UserError for a field of a module with another value than its option allows."""
  for name, option in options.of(type(module)).items():
    option.check(f"model.{name}", getattr(module, name))


class Model(nn.Module):
  """Image patches, blocks, a normalisation, the mean over tokens, a head.

  A family says with `mix` and `pool` what its blocks are and what the mean is taken of.
  `blocks.stacked` says how the parameters of scanned blocks are laid out.

  Raises:
    UserError: a field has another value than its option allows; some would mean another model.
  """

  num_classes: int
  patch_size: Annotated[int, Option("side of a square patch in pixels", 1, SIDE)]
  hidden_dim: Annotated[int, Option("channels of a token", 1, WIDTH)]
  num_blocks: Annotated[int, Option("number of blocks", 0, _DEPTH)]
  stochastic_depth: Annotated[
    float, Option("drop rate of residual branches, for whole examples", 0, _HIGHEST_RATE)
  ] = 0.0
  gelu: Gelu = "exact"
  layer_norm_epsilon: Annotated[float, Option("epsilon of LayerNorm", 0)] = 1e-6
  remat: Annotated[bool, Option(_REMAT, free=True)] = False
  scan_blocks: Annotated[bool, Option("loop over one program of a block: compiles faster")] = False
  dtype: _Dtype = "float32"

  def __post_init__(self):
    check(self)
    super().__post_init__()

  @nn.compact
  def __call__(self, images: jax.Array, *, train: bool = False) -> jax.Array:
    """Maps [batch, height, width, 3] to float32 logits [batch, num_classes].

    The tokens after the last block, [batch, tokens, channels], are sown as "tokens" into the
    collection "intermediates".
    """
    x = layers.image_tokens(images, self.patch_size, self.hidden_dim, self.dtype)
    x = self.mix(x, tuple(side // self.patch_size for side in images.shape[1:3]), train)
    self.sow("intermediates", "tokens", x)
    return layers.mean_logits(self.pool(x), self.num_classes)

  def mix(self, x: jax.Array, grid: tuple[int, int], train: bool) -> jax.Array:
    """Applies the blocks to tokens [batch, tokens, channels], `grid` rows and columns of them."""
    raise NotImplementedError

  def pool(self, x: jax.Array) -> jax.Array:
    """The normalised tokens [batch, any, channels] of which the head sees the mean."""
    raise NotImplementedError


LAYER_KINDS = ("stem", "token_mixing", "channel_mixing", "norms", "head")


@dataclasses.dataclass(frozen=True)
class Layer:
  """The role of a layer.

  Attributes:
    kind: one of `LAYER_KINDS`.
    token_axes: meaning of the axes of a kernel over tokens: "in" and "out" (tokens) or "hidden"; ()
      if there are none, or if they fit any number of tokens. A bias has the last axis.
  """

  kind: str
  token_axes: tuple[str, ...] = ()


STEM, HEAD, NORM = Layer("stem"), Layer("head"), Layer("norms")
TOKENS, CHANNELS = Layer("token_mixing"), Layer("channel_mixing")
TOKENS_IN = Layer("token_mixing", ("in", "hidden"))
TOKENS_OUT = Layer("token_mixing", ("hidden", "out"))
TOKENS_SQUARE = Layer("token_mixing", ("in", "out"))
# Layers of all families.
COMMON = {"stem": STEM, "norm": NORM, "pre_head_layer_norm": NORM, "head": HEAD}


@dataclasses.dataclass(frozen=True)
class Family:
  """A family of models.

  Attributes:
    variants: models by name, ready but for `num_classes`.
    layers: roles by path, beside `COMMON`, without the numbers of blocks: "MixerBlock/LayerNorm_0".
      A role holds for the layers below, unless they have one of their own.
    image_sizes: side in pixels of the images that a variant is meant for, where it is not 224.
    decayed: names of parameters that weight decay of "kernels" acts on.
  """

  variants: Mapping[str, Callable[..., Any]]
  layers: Mapping[str, Layer]
  image_sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
  decayed: tuple[str, ...] = ("kernel",)


def variants(cls: type, fields: Mapping[str, Mapping[str, Any]]) -> dict[str, Callable[..., Any]]:
  """The models of a class by name, from the values of their fields."""
  return {name: functools.partial(cls, **values) for name, values in fields.items()}


def role(table: Mapping[str, Layer], path: str) -> Layer | None:
  """The role, by `Family.layers`, of a parameter as "MixerBlock_0/LayerNorm_0/scale"; or None.

  Scanned blocks are "MixerBlocks".
  """
  path = re.sub(r"^(\w+Block)(s|_\d+)/", r"\1/", path)
  while "/" in path:
    path = path.rpartition("/")[0]
    if path in table:
      return table[path]
  return None
