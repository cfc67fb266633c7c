"""What families of models share: types of options, the model of images, roles of layers."""

import dataclasses
import functools
from typing import Annotated, Any, Callable, Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp

from mixer_jax import options
from mixer_jax.models import layers
from mixer_jax.options import Option, Size, one_of, pair

# Types of options.
width = lambda text, least=1: Annotated[int, Option(text, least)]
rate = lambda text: Annotated[float, Option(text, 0, 0.999)]  # kept values are divided by 1 - rate

# Fields that not all families have, or that have other defaults there.
MlpDim = width("hidden width of the MLP over channels")
DropoutRate = rate("dropout in the MLPs")
Epsilon = Annotated[float, Option("epsilon of LayerNorm", 0)]
Gelu = one_of('"tanh" as in Google\'s code, "exact" as in timm', layers.GELUS)
_REMAT = "compute each block again in the backward pass: saves memory (on a CPU if scanned)"
NumBlocks = Annotated[int, Option("number of blocks", 0)]
Remat = Annotated[bool, Option(_REMAT, free=True)]
ScanBlocks = Annotated[bool, Option("loop over one program of a block: compiles faster")]
StochasticDepth = rate("drop rate of residual branches, for whole examples")
Dtype = one_of("type of the computation; parameters are float32", ("float32", "bfloat16"))


class Checked(nn.Module):
  """A module that raises a UserError for a field with a value that its option does not allow."""

  def __post_init__(self):
    for name, option in options.of(type(self)).items():
      option.check(f"model.{name}", getattr(self, name))
    super().__post_init__()


class Stack(Checked):
  """Equal blocks and a normalisation: what models of images, text and functions share.

  `blocks.stacked` says how the parameters of scanned blocks are laid out.
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
  max_tokens = 0  # size of matrices over tokens; 0: as many as there are

  def mix(
    self, x: jax.Array, train: bool, mask: jax.Array | None = None, grid: tuple[int, ...] = ()
  ) -> Any:
    """Applies the blocks to tokens [batch, tokens, channels].

    `mask` [batch, tokens] is True for a real token; `grid` has the rows and columns of an image's
    tokens. With `feature_blocks` the result is a list of arrays, as of `blocks.apply`.
    """
    raise NotImplementedError

  def pool(self, x: jax.Array) -> jax.Array:
    """Normalises tokens: [batch, tokens, channels] to [batch, any, channels]."""
    epsilon = self.layer_norm_epsilon
    return nn.LayerNorm(epsilon=epsilon, dtype=self.dtype, name=self.last_norm)(x)


class Model(Stack, kw_only=True):
  """Image patches, blocks, a normalisation, the mean over tokens, a head.

  Attributes:
    num_classes: width of the head; 0 means no head: the mean is the output.
    feature_blocks: numbers of blocks, from 0, in rising order, with the last block among them. The
      outputs are then the grids of tokens after these blocks, for decoders of pixels.
  """

  num_classes: int
  feature_blocks: tuple[int, ...] = ()
  patch_size: Annotated[Size, Option("side of a patch in pixels, or height and width", 1)]
  head_init = staticmethod(nn.initializers.zeros)

  @nn.compact
  def __call__(self, images: jax.Array, *, train: bool = False) -> jax.Array:
    """Maps images [batch, height, width, 3] to float32 logits [batch, num_classes].

    Without a head the output is the features [batch, hidden_dim], float32; with `feature_blocks` it
    is a list of [batch, rows, columns, hidden_dim], the last one normalised. Tokens are rows of
    patches from the top, each from the left. Those after the last block are sown as "tokens"
    [batch, tokens, channels] into the collection "intermediates". The head starts as `head_init`
    has it: zero, hence uniform predictions, as in the published Mixer.

    Args:
      images: normalised pixels.
      train: whether stochastic depth and dropout act, which need the rng "dropout".

    Raises:
      ValueError: `patch_size` does not divide the images.
    """
    patch, (height, width) = pair(self.patch_size), images.shape[1:3]
    if height % patch[0] or width % patch[1]:
      given = f"patch_size {self.patch_size}"
      raise ValueError(f"{given} does not divide the image size {height}x{width}")
    patches = dict(kernel_size=patch, strides=patch, padding="VALID")
    x = nn.Conv(self.hidden_dim, **patches, dtype=self.dtype, name="stem")(images)
    x = layers.as_tokens(x)
    grid = height // patch[0], width // patch[1]
    x = self.mix(x, train, grid=grid)
    if self.feature_blocks:
      return self._grids(x, grid)
    self.sow("intermediates", "tokens", x)
    x = jnp.mean(self.pool(x), axis=1, dtype=jnp.float32)
    if not self.num_classes:
      return x
    return nn.Dense(self.num_classes, kernel_init=self.head_init, name="head")(x)

  def _grids(self, each: list[jax.Array], grid: tuple[int, int]) -> list[jax.Array]:
    last = self.pool(each[-1])
    if last.shape != each[-1].shape:
      raise ValueError(
        "the model pools its tokens before the last norm: it has no grid of features"
      )
    return [x.reshape(len(x), *grid, x.shape[-1]) for x in (*each[:-1], last)]


LAYER_KINDS = ("stem", "token_mixing", "channel_mixing", "norms", "head")


@dataclasses.dataclass(frozen=True)
class Layer:
  """The role of a layer."""

  kind: str  # one of `LAYER_KINDS`
  # What the axes of a kernel over tokens are: "in" and "out" (tokens) or "hidden"; () if there are
  # none, or if they fit any number of tokens. A bias has the last axis.
  token_axes: tuple[str, ...] = ()


STEM, TOKENS = Layer("stem"), Layer("token_mixing")
TOKENS_IN = Layer("token_mixing", ("in", "hidden"))
TOKENS_OUT = Layer("token_mixing", ("hidden", "out"))
TOKENS_SQUARE = Layer("token_mixing", ("in", "out"))


@dataclasses.dataclass(frozen=True)
class Family:
  """A family of models."""

  variants: Mapping[str, Callable[..., Any]]  # by name; what they lack depends on the task
  # Roles of stems and of layers over tokens by path, without numbers of blocks, as
  # "MixerBlock/token_mixing". A role holds for the layers below, unless they have one of their own.
  # Norms and heads are known by their names; all other layers mix channels.
  layers: Mapping[str, Layer]
  # Side in pixels of the images that a variant is meant for, where it is not 224.
  image_sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)


def variants(cls: type, fields: Mapping[str, Mapping[str, Any]]) -> dict[str, Callable[..., Any]]:
  """The models of a class by name, from the values of their fields."""
  return {name: functools.partial(cls, **values) for name, values in fields.items()}
