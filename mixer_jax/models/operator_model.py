"""Models of operators: from values of a function on a grid to those of another on the same grid."""

from typing import Annotated, Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from mixer_jax.errors import UserError
from mixer_jax.models import family, interpolate, layers, spectral
from mixer_jax.models.spectral import shown
from mixer_jax.options import Option, one_of

_MODES = "lowest Fourier modes of spectral convolutions, along each axis"
_DIRICHLET = "outputs at the boundary of the grid are zero"
_POSITIONS = "positions are features of the decoder too, and of a linear extractor"
_DROPOUT = "dropout outside the blocks: before them, in a refinement, in the decoder"
Modes = Annotated[int, Option(_MODES, 1)]
Dirichlet = Annotated[bool, Option(_DIRICHLET)]


class Operator(family.Checked, kw_only=True):
  """Maps values and positions on a grid to values; the models of `OPERATORS` are subclasses.

  A field that does not fit the grid raises a UserError.

  Attributes:
    grid: points along each axis of the training grid.
    inputs: values at a point.
    outputs: values that a point gets.
    axes: allowed numbers of axes of the grid.

  Example:
    ```python
    import jax
    import jax.numpy as jnp
    from mixer_jax import models

    model = models.operator("fno_2d", grid=(16, 16), modes=4)
    assert isinstance(model, models.Operator)
    values, positions = jnp.zeros((2, 16, 16, 1)), jnp.zeros((16, 16, 2))
    shapes = jax.eval_shape(model.init, jax.random.key(0), values, positions)
    ```
  """

  grid: tuple[int, ...]
  inputs: int = 1
  outputs: int = 1
  axes: tuple[int, ...] = (1, 2)
  dirichlet: Dirichlet = False
  dtype: family.Dtype = "float32"
  # Values of fields for domains without ends.
  periodic = {"dirichlet": False}
  # Fields that are not read where another field has a value.
  unread_with = {}

  def __post_init__(self):
    if len(self.grid) not in self.axes:
      allowed = " or ".join(map(str, self.axes))
      raise UserError(f"the number of axes of a grid is {len(self.grid)}; allowed: {allowed}")
    super().__post_init__()

  @nn.compact
  def __call__(self, values: jax.Array, positions: jax.Array, *, train: bool = False) -> jax.Array:
    """Maps values of functions on a grid to float32 values `[batch, *grid, outputs]`.

    Args:
      values: `[batch, *grid, inputs]`.
      positions: coordinates of the points, `[*grid, axes]`.
      train: whether to drop, which needs the rng "dropout".

    Raises:
      ValueError: the shapes are others, or the model cannot take the grid.
    """
    grid, rank = values.shape[1:-1], len(self.grid)
    if values.ndim != rank + 2 or values.shape[-1] != self.inputs:
      raise ValueError(
        f"values are {values.shape}; allowed: a batch, {rank} axes, {self.inputs} channels"
      )
    positions = positions.astype(jnp.float32)
    x = self.features(values.astype(self.dtype), positions, train).astype(jnp.float32)
    y = nn.Dense(self.outputs, name="head", **layers.uniform_start(x.shape[-1]))(x)
    y = interpolate.resize(y, grid)
    if not self.dirichlet:
      return y
    inside = (slice(None), *[slice(1, -1)] * rank)
    return jnp.pad(y[inside], [(0, 0), *[(1, 1)] * rank, (0, 0)])

  @property
  def needs_ends(self) -> tuple[str, Any] | None:
    """A field by which the model is for domains with ends, and its value for periodic ones."""
    return next((x for x in self.periodic.items() if getattr(self, x[0]) != x[1]), None)

  @property
  def unread(self) -> dict[str, str]:
    """The fields that this model does not read, each with the field that decides it."""
    chosen = [(by, f) for (by, value), f in self.unread_with.items() if getattr(self, by) == value]
    return {field: by for by, fields in chosen for field in fields}

  def attention_grid(self, grid: tuple[int, ...]) -> tuple[int, ...]:
    """The points that attention sees of functions on a grid."""
    return grid

  def features(self, values: jax.Array, positions: jax.Array, train: bool) -> jax.Array:
    """Features [batch, *grid, any], the input of the head.

    On a coarser grid with the same ends the outputs are interpolated.
    """
    raise NotImplementedError

  def dense(self, features: int, x: jax.Array, name: str) -> jax.Array:
    """A layer over channels, with PyTorch's start."""
    start = layers.uniform_start(x.shape[-1])
    return layers.Dense(features, dtype=self.dtype, name=name, **start)(x)

  def check_modes(self, modes: int, more: int = 0) -> None:
    """Raises a UserError if the training grid, and `more` points, has too few for the modes."""
    if spectral.too_small(tuple(n + more for n in self.grid), modes):
      least = tuple(n - more for n in spectral.smallest_grid(modes, len(self.grid)))
      raise UserError(
        f"model.modes is {modes}, which needs a grid of {shown(least)} points; it has"
        f" {shown(self.grid)}"
      )


def with_positions(x: jax.Array, positions: jax.Array) -> jax.Array:
  """Positions [*grid, axes] as further channels of [batch, *grid, channels]."""
  positions = jnp.broadcast_to(positions.astype(x.dtype), (*x.shape[:-1], positions.shape[-1]))
  return jnp.concatenate([x, positions], axis=-1)


class Decoded(Operator, kw_only=True):
  """An operator whose values are decoded as in Cao's code, after `encode`.

  The decoder "spectral" has `SpectralBlock`s with SiLU, for smooth outputs; "pointwise" has dense
  layers with SiLU. Both may read positions first.
  """

  decoder: one_of("spectral convolutions, or dense layers at each point", ("spectral", "pointwise"))
  decoder_dim: family.width("channels of the decoder")
  decoder_layers: Annotated[int, Option("spectral convolutions, or dense layers", 1)]
  decoder_mlp_dim: family.width("hidden width after spectral convolutions") = 128
  modes: Modes = 12
  position_features: Annotated[bool, Option(_POSITIONS)] = True
  decoder_dropout: family.rate(_DROPOUT) = 0.0
  unread_with = {("decoder", "pointwise"): ("modes", "decoder_mlp_dim")}

  def __post_init__(self):
    super().__post_init__()
    if self.decoder == "spectral":
      self.check_modes(self.modes)

  def features(self, values: jax.Array, positions: jax.Array, train: bool) -> jax.Array:
    x = self.encode(values, positions, train)
    return self.decode(x, interpolate.resize(positions[None], x.shape[1:-1])[0], train)

  def encode(self, values: jax.Array, positions: jax.Array, train: bool) -> jax.Array:
    """Features [batch, *grid, any] for the decoder; the grid may be coarser."""
    raise NotImplementedError

  def decode(self, x: jax.Array, positions: jax.Array, train: bool) -> jax.Array:
    """Features [batch, *grid, any] for the head."""
    if self.position_features:
      x = self.dense(self.decoder_dim, with_positions(x, positions), "decoder_in")
    for i in range(self.decoder_layers):
      if self.decoder == "spectral":
        x = self._spectral(x, f"SpectralBlock_{i}", train)
      else:
        x = self.drop(nn.silu(self.dense(self.decoder_dim, x, f"decoder_{i}")), train)
    if self.decoder == "spectral":
      x = nn.silu(self.dense(self.decoder_mlp_dim, x, "decoder_out"))
    return x

  def drop(self, x: jax.Array, train: bool) -> jax.Array:
    return layers.Dropout(self.decoder_dropout, deterministic=not train)(x)

  def _spectral(self, x: jax.Array, name: str, train: bool) -> jax.Array:
    # The published start: Xavier's normal law as PyTorch counts the axes [in, out, modes, 2], or
    # [in, out, modes, modes, 2], with gain 1 / (in out), in two dimensions times sqrt(in + out).
    wide, rank = x.shape[-1] + self.decoder_dim, len(self.grid)
    gain = (wide**0.5 if rank == 2 else 1.0) / (x.shape[-1] * self.decoder_dim)
    start = nn.initializers.normal(gain * (wide * self.modes**rank) ** -0.5)
    fields = dict(dropout_rate=self.decoder_dropout, dtype=self.dtype, name=name)
    block = spectral.SpectralBlock(self.decoder_dim, self.modes, start, **fields)
    return block(x, train=train)


LAYERS = {"SpectralBlock/conv": family.TOKENS}
