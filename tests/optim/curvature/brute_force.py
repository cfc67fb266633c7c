"""Factors of a layer by brute force in float64: rows by probing, gradients by offsets of outputs."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from mixer_jax import optim


def factors(predict, params, batch, rng=None, **options):
  """The factors of one batch, exact ones if no key is given."""
  if rng is None:
    options = {"estimation": "exact"} | options
  return optim.Curvature(predict, params, batch, **options).factors(params, batch, rng)


def kinds(predict, params, batch, **options):
  """The kind of each block, by its name."""
  return {b.name: b.kind for b in optim.Curvature(predict, params, batch, **options).blocks}


def close(a, b, rtol=1e-4, atol=1e-6):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


def with_ones(rows):
  return np.concatenate([rows, np.ones((*rows.shape[:-1], 1))], axis=-1)


class Between(nn.Module):
  """A layer of the name "layer", and a head."""

  make: object

  @nn.compact
  def __call__(self, x):
    x = nn.tanh(self.make()(x))
    return nn.Dense(3, name="head")(x.reshape(len(x), -1))


def of_layer(model, params, x, matrix, rows):
  """A [*blocks, d_in, d_in] and G [*blocks, d_out, d_out] of the layer "layer" of `Between`, "expand".

  `matrix` maps the kernel to [*blocks, d_in, d_out] and `rows` the outputs to [rows, *blocks, d_out];
  both only move elements.
  """
  with jax.enable_x64(True):
    wide = lambda tree: jax.tree.map(lambda z: jnp.asarray(z, jnp.float64), tree)
    params, x = wide(params), wide(x)
    layer, own = model.make().clone(parent=None, name=None), params["layer"]
    kernel = own["kernel"]
    place = matrix(np.arange(kernel.size).reshape(kernel.shape))
    unbiased = {k: jnp.zeros_like(v) for k, v in own.items()}
    a = []
    for i in range(place.shape[-2]):  # each entry alone, to the first output
      probe = np.zeros(kernel.size)
      probe[place[..., i, 0]] = 1.0
      y = layer.apply({"params": unbiased | {"kernel": probe.reshape(kernel.shape)}}, x)
      a.append(np.asarray(rows(y))[..., 0])
    a = np.stack(a, axis=-1)
    a = with_ones(a) if "bias" in own else a

    def log_loss(offset, x, label):
      h = jnp.tanh(layer.apply({"params": own}, x[None]) + offset)
      logits = h.reshape(1, -1) @ params["head"]["kernel"] + params["head"]["bias"]
      return -jax.nn.log_softmax(logits[0])[label]

    zero = jnp.zeros(layer.apply({"params": own}, x[:1]).shape)
    every = jax.vmap(jax.vmap(jax.grad(log_loss), (None, None, 0)), (None, 0, None))
    d = np.asarray(jax.jit(every)(zero, x, jnp.arange(3)))
    d = np.stack([[np.asarray(rows(y)) for y in example] for example in d])
    p = np.asarray(jax.nn.softmax(model.apply({"params": params}, x)))
  g = np.einsum("by,byt...o,byt...p->...op", p, d, d) / len(x)
  return np.einsum("t...i,t...j->...ij", a, a) / len(a), g
