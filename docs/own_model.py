"""K-FAC on your own Linen model, in your own loop: `python docs/own_model.py`."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from mixer_jax import optim


class MyMlp(nn.Module):
  @nn.compact
  def __call__(self, x):
    for width in (64, 64):
      x = nn.tanh(nn.Dense(width)(x))
    return nn.Dense(2)(x)


def spirals(key, n=512):
  """Two interleaved spirals, points [n, 2] and labels [n]."""
  turn_key, noise_key = jax.random.split(key)
  labels = jnp.arange(n) % 2
  turn = 3.0 * jnp.pi * jnp.sqrt(jax.random.uniform(turn_key, (n,)))
  points = turn[:, None] * jnp.stack(
    [jnp.cos(turn + jnp.pi * labels), jnp.sin(turn + jnp.pi * labels)], 1
  )
  return (points + 0.3 * jax.random.normal(noise_key, (n, 2))) / 5.0, labels


def main(steps=300):
  model, (x, y) = MyMlp(), spirals(jax.random.key(0))
  params = model.init(jax.random.key(1), x)["params"]
  predict = lambda params, x: model.apply({"params": params}, x)
  tx = optax.chain(
    optim.scale_by_kfac(predict, params, x, damping=1e-2, factor_period=1, inverse_period=5),
    optax.clip_by_global_norm(1.0),
    optax.trace(0.9),
    optax.scale(-0.05),
  )

  def loss(params):
    return optax.softmax_cross_entropy_with_integer_labels(predict(params, x), y).mean()

  def step(carry, key):
    params, state = carry
    value, grads = jax.value_and_grad(loss)(params)
    updates, state = tx.update(grads, state, params, batch=x, rng=key)
    return (optax.apply_updates(params, updates), state), value

  keys = jax.random.split(jax.random.key(2), steps)
  _, losses = jax.jit(lambda c: jax.lax.scan(step, c, keys))((params, tx.init(params)))
  print(f"loss {losses[0]:.3f} -> {losses[-1]:.4f} in {steps} steps")
  return losses


if __name__ == "__main__":
  main()
