"""Deep autoencoders of dense layers, with the shapes of published ones.

Hinton and Salakhutdinov, "Reducing the Dimensionality of Data with Neural Networks" (Science,
2006); trained without their pre-training by Martens (ICML 2010), and Martens and Grosse (2015),
https://arxiv.org/abs/1503.05671.
"""

import functools
from typing import Annotated

import flax.linen as nn
import jax
import jax.numpy as jnp

from mixer_jax.models import layers
from mixer_jax.options import Option, one_of

# Widths of the encoders' layers by the set of images that each is for. The last one is the code's.
_WIDTHS = {
  "small": (128, 64, 32),
  "mnist": (1000, 500, 250, 30),
  "curves": (400, 200, 100, 50, 25, 6),
  "faces": (2000, 1000, 500, 30),
}
_ACTIVATIONS = {"tanh": nn.tanh, "sigmoid": nn.sigmoid}
_CONNECTIONS = 15

Widths = Annotated[
  tuple[int, ...], Option("units of the encoder's layers, the code's last", 1, 10**6)
]


def sparse(connections: int, scale: float) -> nn.initializers.Initializer:
  """Gives each unit so many incoming weights from a normal distribution; the others are 0.

  Martens (2010), Section 5: 15 connections of scale 1. For tanh units Sutskever et al. (2013)
  take a quarter of it.
  """

  def init(key, shape, dtype=jnp.float32):
    chosen, drawn = jax.random.split(key)
    ranks = jnp.argsort(jnp.argsort(jax.random.uniform(chosen, shape, jnp.float32), axis=0), axis=0)
    return jnp.where(ranks < connections, scale * jax.random.normal(drawn, shape, dtype), 0)

  return init


class Autoencoder(nn.Module):
  """Dense layers down to a linear code, and the same widths back to the inputs."""

  widths: Widths
  activation: one_of("activation of the hidden layers", tuple(_ACTIVATIONS)) = "tanh"
  initializer: one_of("initialiser of the weights; biases are 0", ("glorot", "sparse")) = "glorot"

  @nn.compact
  def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Maps [batch, inputs] to outputs of the same shape, linear, and codes [batch, widths[-1]]."""
    activation, outputs = _ACTIVATIONS[self.activation], x.shape[-1]
    *inner, narrow = self.widths
    for i, width in enumerate(inner):
      x = activation(self._dense(width, f"encoder_{i}")(x))
    code = x = self._dense(narrow, "code")(x)
    for i, width in enumerate(reversed(inner)):
      x = activation(self._dense(width, f"decoder_{i}")(x))
    return self._dense(outputs, "output")(x), code

  def _dense(self, width: int, name: str) -> nn.Module:
    kernel = nn.initializers.glorot_uniform()
    if self.initializer == "sparse":
      kernel = sparse(_CONNECTIONS, 0.25 if self.activation == "tanh" else 1.0)
    return layers.Dense(width, kernel_init=kernel, name=name)


VARIANTS = {
  f"autoencoder_{name}": functools.partial(Autoencoder, widths=widths)
  for name, widths in _WIDTHS.items()
}
