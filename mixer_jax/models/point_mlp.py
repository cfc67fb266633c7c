"""Functions of a point by dense layers, for equations that they shall solve."""

import functools
from typing import Annotated, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from mixer_jax.models import layers
from mixer_jax.options import Option, one_of

_ACTIVATIONS = {
  "tanh": nn.tanh,
  "sine": jnp.sin,
  "gelu": functools.partial(layers.gelu, form="tanh"),
}
_START = (
  '"pytorch": uniform within 1 / sqrt(inputs), biases too; "glorot": Glorot\'s uniform, biases 0;'
  ' "siren": for sines'
)
_HARMONICS = "harmonics of each axis in which the solution is periodic"
_FEATURES = "random Fourier features, a cosine and a sine each; 0: none"


class PointMlp(nn.Module):
  """Maps a point [dim] to the values of functions [functions], for equations that they shall solve.

  An axis with a period enters as cosines and sines of its harmonics, so that the functions are
  periodic to all orders (Dong and Ni, 2021, https://arxiv.org/abs/2007.07442). Fourier features are
  cosines and sines of random projections, which are not trained (Tancik et al., 2020,
  https://arxiv.org/abs/2006.10739); they stand in the collection "constants". The start "siren" is
  that of Sitzmann et al., 2020, https://arxiv.org/abs/2006.09661, Section 3.2.

  Attributes:
    functions: number of values.
    low: lower corner of the domain, [dim].
    high: upper corner of the domain, [dim].
    periods: period of each axis, [dim], 0 for an axis that has none; () if none has one.
    param_dtype: type of the parameters and of the computation.

  Example:
    ```python
    import jax
    import jax.numpy as jnp
    from mixer_jax import models

    net = models.PointMlp(functions=1, low=(0.0, 0.0), high=(1.0, 1.0), hidden_dims=(8,))
    params = net.init(jax.random.key(0), jnp.zeros(2))
    u = lambda x: net.apply(params, x)[0]
    laplacian = jnp.trace(jax.hessian(u)(jnp.array([0.3, 0.4])))
    ```
  """

  functions: int
  low: tuple[float, ...]
  high: tuple[float, ...]
  periods: tuple[float, ...] = ()
  param_dtype: Any = jnp.float32
  hidden_dims: Annotated[tuple[int, ...], Option("units of the hidden layers", 1)] = (64,)
  activation: one_of("activation of the hidden layers", tuple(_ACTIVATIONS)) = "tanh"
  start: one_of(_START, ("pytorch", "glorot", "siren")) = "pytorch"
  omega: Annotated[float, Option("factor of the first layer's outputs; SIREN's is 30")] = 1.0
  scaled: Annotated[bool, Option("inputs from the domain to [-1, 1] on each axis")] = False
  harmonics: Annotated[int, Option(_HARMONICS, 1)] = 1
  fourier_features: Annotated[int, Option(_FEATURES, 0)] = 0
  fourier_scale: Annotated[float, Option("standard deviation of their frequencies", 0)] = 1.0

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps a point [dim] to values [functions]."""
    x = self._embedded(x.astype(self.param_dtype))
    for i, width in enumerate(self.hidden_dims):
      x = self._dense(int(width), x, first=i == 0)
      x = _ACTIVATIONS[self.activation](self.omega * x if i == 0 and self.omega != 1 else x)
    return self._dense(self.functions, x, first=not self.hidden_dims)

  def _embedded(self, x: jax.Array) -> jax.Array:
    low, high = (np.asarray(side, self.param_dtype) for side in (self.low, self.high))
    periods = np.asarray(self.periods or np.zeros(len(low)))
    parts, others = [], np.flatnonzero(periods == 0)
    for axis in np.flatnonzero(periods):
      wave = 2 * np.pi / periods[axis] * np.arange(1, self.harmonics + 1)
      angle = wave.astype(self.param_dtype) * (x[axis] - low[axis])
      parts += [jnp.cos(angle), jnp.sin(angle)]
    if others.size:
      rest = x[others]
      if self.scaled:
        rest = (2 * rest - (low + high)[others]) / (high - low)[others]
      parts.insert(0, rest)
    x = jnp.concatenate(parts)
    if not self.fourier_features:
      return x
    shape = (x.size, self.fourier_features)
    normal = lambda: jax.random.normal(self.make_rng("params"), shape, self.param_dtype)
    draw = lambda: self.fourier_scale * normal()
    angle = x @ self.variable("constants", "frequencies", draw).value
    return jnp.concatenate([jnp.cos(angle), jnp.sin(angle)])

  def _dense(self, width: int, x: jax.Array, first: bool) -> jax.Array:
    starts = layers.uniform_start(x.size)
    if self.start == "glorot":
      starts = dict(kernel_init=nn.initializers.glorot_uniform())
    elif self.start == "siren":
      bound = 1 / x.size if first else (6 / x.size) ** 0.5
      starts["kernel_init"] = lambda key, shape, dtype: jax.random.uniform(
        key, shape, dtype, -bound, bound
      )
    return nn.Dense(width, param_dtype=self.param_dtype, **starts)(x)


POINT_NETS = {"mlp": PointMlp}
