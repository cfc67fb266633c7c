"""Facts that a family of models states about itself, and the model that the families share."""

import dataclasses
import functools
import re
from typing import Annotated, Any, Callable, Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp

from mixer_jax import options
from mixer_jax.models import layers
from mixer_jax.options import Option, one_of

# Larger values are mistakes, and would take hours or all memory to fail.
SIDE = 2**14  # of an image, in pixels
WIDTH = 10**6  # of a layer
_DEPTH = 1000  # blocks
_HIGHEST_RATE = 0.999

# Types of options.
width = lambda text, least=1: Annotated[int, Option(text, least, WIDTH)]
rate = lambda text: Annotated[float, Option(text, 0, _HIGHEST_RATE)]

# Fields that not all families have, or with other defaults.
MlpDim = width("hidden width of the MLP over channels")
DropoutRate = rate("dropout in the MLPs")
Epsilon = Annotated[float, Option("epsilon of LayerNorm", 0)]
Gelu = one_of('"tanh" as in Google\'s code, "exact" as in timm', layers.GELUS)
_REMAT = "compute each block again in the backward pass: saves memory (on a CPU if scanned)"
NumBlocks = Annotated[int, Option("number of blocks", 0, _DEPTH)]
Remat = Annotated[bool, Option(_REMAT, free=True)]
ScanBlocks = Annotated[bool, Option("loop over one program of a block: compiles faster")]
StochasticDepth = rate("drop rate of residual branches, for whole examples")
Dtype = one_of("type of the computation; parameters are float32", ("float32", "bfloat16"))


def check(module: nn.Module) -> None:
  """Raises a UserError for a field of a module with another value than its option allows."""
  for name, option in options.of(type(module)).items():
    option.check(f"model.{name}", getattr(module, name))


class Stack(nn.Module):
  """Equal blocks and a normalisation: the part that models of images and of text share.

  `blocks.stacked` says how the parameters of scanned blocks are laid out. A UserError if a field
  has a value that its option does not allow.
  """

  hidden_dim: width("channels of a token")
  num_blocks: NumBlocks
  stochastic_depth: StochasticDepth = 0.0
  gelu: Gelu = "exact"
  layer_norm_epsilon: Epsilon = 1e-6
  remat: Remat = False
  scan_blocks: ScanBlocks = False
  dtype: Dtype = "float32"
  last_norm = "norm"  # the name of the layer after the blocks

  def __post_init__(self):
    check(self)
    super().__post_init__()

  def pool(self, x: jax.Array) -> jax.Array:
    """The normalised tokens [batch, any, channels]; the head sees their mean."""
    epsilon = self.layer_norm_epsilon
    return nn.LayerNorm(epsilon=epsilon, dtype=self.dtype, name=self.last_norm)(x)


class Model(Stack, kw_only=True):
  """Image patches, blocks, a normalisation, the mean over tokens, a head.

  A family has its blocks in `mix`. With num_classes=0 there is no head: the mean is the output. With
  `feature_blocks`, numbers of blocks from 0 in rising order, the last block among them, the outputs
  are grids of tokens after these blocks, for decoders of pixels.
  """

  num_classes: int
  feature_blocks: tuple[int, ...] = ()
  patch_size: Annotated[int, Option("side of a square patch in pixels", 1, SIDE)]
  head_init = staticmethod(nn.initializers.zeros)

  @nn.compact
  def __call__(self, images: jax.Array, *, train: bool = False) -> jax.Array:
    """Maps [batch, height, width, 3] to float32 logits [batch, num_classes].

    Without a head: to features [batch, hidden_dim], float32; with `feature_blocks` to a list of
    [batch, rows, columns, hidden_dim], the last one normalised as a head would see it. Tokens are
    rows of patches from the top, each from the left; after the last block they are sown as "tokens"
    [batch, tokens, channels] into the collection "intermediates". The head starts as `head_init`
    has it: at zero, hence at the uniform prediction, as the published Mixer. A ValueError if
    `patch_size` does not divide the images.
    """
    side, (height, width) = self.patch_size, images.shape[1:3]
    if height % side or width % side:
      raise ValueError(f"patch_size {side} does not divide the image size {height}x{width}")
    patches = dict(kernel_size=(side, side), strides=(side, side), padding="VALID")
    x = nn.Conv(self.hidden_dim, **patches, dtype=self.dtype, name="stem")(images)
    x = x.reshape(len(x), -1, self.hidden_dim)
    grid = height // side, width // side
    x = self.mix(x, grid, train)
    if self.feature_blocks:
      return self._grids(x, grid)
    self.sow("intermediates", "tokens", x)
    x = jnp.mean(self.pool(x), axis=1, dtype=jnp.float32)
    if not self.num_classes:
      return x
    return nn.Dense(self.num_classes, kernel_init=self.head_init, name="head")(x)

  def mix(self, x: jax.Array, grid: tuple[int, int], train: bool) -> Any:
    """Applies the blocks to tokens [batch, tokens, channels], `grid` rows and columns of them."""
    raise NotImplementedError

  def _grids(self, each: list[jax.Array], grid: tuple[int, int]) -> list[jax.Array]:
    last = self.pool(each[-1])
    if last.shape != each[-1].shape:
      raise ValueError(
        "the model pools its tokens before the last norm: it has no grid of features"
      )
    return [x.reshape(len(x), *grid, -1) for x in (*each[:-1], last)]


LAYER_KINDS = ("stem", "token_mixing", "channel_mixing", "norms", "head")


@dataclasses.dataclass(frozen=True)
class Layer:
  """The role of a layer."""

  kind: str  # one of `LAYER_KINDS`
  # Meaning of the axes of a kernel over tokens: "in" and "out" (tokens) or "hidden"; () if there
  # are none, or if they fit any number of tokens. A bias has the last axis.
  token_axes: tuple[str, ...] = ()


STEM, HEAD, NORM = Layer("stem"), Layer("head"), Layer("norms")
TOKENS, CHANNELS = Layer("token_mixing"), Layer("channel_mixing")
TOKENS_IN = Layer("token_mixing", ("in", "hidden"))
TOKENS_OUT = Layer("token_mixing", ("hidden", "out"))
TOKENS_SQUARE = Layer("token_mixing", ("in", "out"))
# Layers of all families.
_NORMS = dict.fromkeys(("norm", "stem_norm", "pre_head_layer_norm"), NORM)
COMMON = {"stem": STEM, "head": HEAD, **_NORMS}


@dataclasses.dataclass(frozen=True)
class Family:
  """A family of models."""

  variants: Mapping[str, Callable[..., Any]]  # models by name, ready but for `num_classes`
  # Roles by path, beside `COMMON`, without the numbers of blocks: "MixerBlock/LayerNorm_0". A role
  # holds for the layers below, unless they have one of their own.
  layers: Mapping[str, Layer]
  # Side in pixels of the images that a variant is meant for, where it is not 224.
  image_sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
  # Ends of the paths of parameters that weight decay of "kernels" acts on.
  decayed: tuple[str, ...] = ("kernel",)


def variants(cls: type, fields: Mapping[str, Mapping[str, Any]]) -> dict[str, Callable[..., Any]]:
  """The models of a class by name, from the values of their fields."""
  return {name: functools.partial(cls, **values) for name, values in fields.items()}


def role(table: Mapping[str, Layer], path: str) -> Layer | None:
  """The role, by `Family.layers`, of a parameter as "MixerBlock_0/LayerNorm_0/scale"; or None.

  Scanned blocks are "MixerBlocks". A model inside another module stands below "encoder", if it is
  of text, or "backbone", if it is of images.
  """
  path = re.sub(r"^(encoder|backbone)/", "", path)
  path = re.sub(r"^(\w+Block)(s|_\d+)/", r"\1/", path)
  while "/" in path:
    path = path.rpartition("/")[0]
    if path in table:
      return table[path]
  return None
