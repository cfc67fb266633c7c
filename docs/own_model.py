"""K-FAC on your own models, in your own loop: `python docs/own_model.py`.

An MLP without any library, a transformer in NNX and a convolutional autoencoder in Linen, each trained
by Adam and by K-FAC with learning rates that fall to zero: Adam's is the best of seven from 0.001 to
0.1, K-FAC's of at most five.
"""

from flax import nnx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from mixer_jax import optim


def train(tx, predict, loss, params, draw, steps):
  """The losses [steps] of batches draw(key); `loss` takes all that `predict` returns."""
  tx = optax.with_extra_args_support(tx)  # Adam ignores the batch and the key of K-FAC

  def step(carry, key):
    params, state = carry
    batch_key, kfac_key = jax.random.split(key)
    batch = draw(batch_key)
    value, grads = jax.value_and_grad(lambda p: loss(*predict(p, batch)))(params)
    updates, state = tx.update(grads, state, params, batch=batch, rng=kfac_key)
    return (optax.apply_updates(params, updates), state), value

  keys = jax.random.split(jax.random.key(2), steps)
  return jax.jit(lambda carry: jax.lax.scan(step, carry, keys)[1])((params, tx.init(params)))


def falling(rate, steps):
  return optax.linear_schedule(rate, 0.0, steps)


def spirals(key, n=512):
  """Two interleaved spirals, points [n, 2] and labels [n]."""
  turn_key, noise_key = jax.random.split(key)
  labels = jnp.arange(n) % 2
  turn = 3.0 * jnp.pi * jnp.sqrt(jax.random.uniform(turn_key, (n,)))
  angle = turn + jnp.pi * labels
  points = turn[:, None] * jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=1)
  return (points + 0.3 * jax.random.normal(noise_key, (n, 2))) / 5.0, labels


def mlp(steps=150):
  batch, draw = spirals(jax.random.key(0)), jax.nn.initializers.lecun_normal()
  sizes, keys = (2, 64, 64, 2), jax.random.split(jax.random.key(1), 3)
  params = [(draw(k, (n, m)), jnp.zeros(m)) for k, n, m in zip(keys, sizes, sizes[1:])]

  def predict(params, batch):  # logits and labels
    x, labels = batch
    *hidden, (w, b) = params
    for v, c in hidden:
      x = jnp.tanh(x @ v + c)
    return x @ w + b, labels

  loss = lambda *pair: optax.softmax_cross_entropy_with_integer_labels(*pair).mean()
  curvature = optim.Curvature(predict, params, batch)
  kfac = optax.chain(  # K-FAC's direction, in a chain of your own
    optim.scale_by_kfac(curvature, damping=1e-2, factor_period=1, inverse_period=5),
    optax.clip_by_global_norm(1.0),
    optax.trace(0.9),
    optax.scale_by_learning_rate(falling(0.3, steps)),
  )
  both = {"adam": optax.adam(falling(0.05, steps)), "kfac": kfac}
  return {k: train(tx, predict, loss, params, lambda key: batch, steps) for k, tx in both.items()}


class Transformer(nnx.Module):
  """An encoder with an answer for each token, logits [batch, tokens, 11]; id 0 is padding."""

  def __init__(self, rngs, tokens=8, width=32):
    self.positions = nnx.Param(0.5 * jax.random.normal(rngs.params(), (tokens, width)))
    self.words = nnx.Embed(11, width, rngs=rngs)
    self.attention = nnx.MultiHeadAttention(2, width, decode=False, rngs=rngs)
    self.first = nnx.Linear(width, 2 * width, rngs=rngs)
    self.second = nnx.Linear(2 * width, width, rngs=rngs)
    self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(3)])
    self.head = nnx.Linear(width, 11, rngs=rngs)

  def __call__(self, ids):
    x = self.words(ids) + self.positions[...]
    x = x + self.attention(self.norms[0](x), mask=nnx.make_attention_mask(ids > 0, ids > 0))
    x = x + self.second(nnx.gelu(self.first(self.norms[1](x))))
    return self.head(self.norms[2](x))


def numbers(key, n=64, longest=8):
  """Lists of 3 to `longest` numbers from 1 to 10, as ids [n, longest] with 0 after the end."""
  number_key, length_key = jax.random.split(key)
  lengths = jax.random.randint(length_key, (n, 1), 3, longest + 1)
  ids = jax.random.randint(number_key, (n, longest), 1, 11)
  return jnp.where(jnp.arange(longest) < lengths, ids, 0)


def transformer(steps=120):
  """Sorts lists."""
  ids = numbers(jax.random.key(0))
  graph, params = nnx.split(Transformer(nnx.Rngs(1)))

  def predict(params, ids):  # logits, labels, and the weights of the loss: none for padding
    labels = jnp.sort(jnp.where(ids > 0, ids, 99), axis=1) % 99
    return nnx.merge(graph, params)(ids), labels, (ids > 0).astype(jnp.float32)

  def loss(logits, labels, weights):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return (weights * losses).sum() / weights.sum()

  cadence = dict(damping=1e-2, factor_period=1, inverse_period=10, weight_decay=0.0)
  curvature = optim.Curvature(predict, params, ids)
  print(curvature)  # positions, scales and shifts take the plain gradient
  kfac = optim.kfac(falling(0.1, steps), curvature, **cadence)
  both = {"adam": optax.adam(falling(0.01, steps)), "kfac": kfac}
  return {k: train(tx, predict, loss, params, numbers, steps) for k, tx in both.items()}


class Autoencoder(nn.Module):
  """Pictures [batch, size, size, 1] through a code of six numbers; logits like the pictures."""

  @nn.compact
  def __call__(self, x):
    norm = lambda: nn.BatchNorm(use_running_average=False)
    for channels in (8, 16):
      x = nn.relu(norm()(nn.Conv(channels, (3, 3), strides=2)(x)))
    shape = x.shape
    x = nn.Dense(6)(x.reshape(len(x), -1))
    x = nn.Dense(np.prod(shape[1:]))(x).reshape(shape)
    x = nn.relu(norm()(nn.ConvTranspose(8, (3, 3), strides=(2, 2))(x)))
    return nn.ConvTranspose(1, (3, 3), strides=(2, 2))(x)


def pictures(n=512, size=8):
  """Discs, boxes and crosses, 0 and 1, [n, size, size, 1]."""
  rng = np.random.default_rng(0)
  row, column = rng.uniform(2, size - 3, (2, n, 1, 1))
  down, right = abs(np.arange(size)[:, None] - row), abs(np.arange(size) - column)
  radius, kind = rng.uniform(1, 3, (n, 1, 1)), rng.integers(0, 3, (n, 1, 1))
  disc, box = np.hypot(down, right) < radius, np.maximum(down, right) < radius
  chosen = np.select([kind == 0, kind == 1], [disc, box], box & (np.minimum(down, right) < 0.6))
  return jnp.asarray(chosen[..., None], jnp.float32)


def autoencoder(steps=120):
  model, data = Autoencoder(), pictures()
  params = jax.jit(model.init)(jax.random.key(1), data)["params"]

  def predict(params, x):  # logits and targets; BatchNorm's averages are not wanted here
    logits, _ = model.apply({"params": params}, x, mutable=["batch_stats"])
    return logits, x

  loss = lambda *pair: optax.sigmoid_binary_cross_entropy(*pair).mean()
  draw = lambda key: jax.random.choice(key, data, (64,), replace=False)
  about = dict(likelihood="bernoulli", token_averaging="expand")
  # BatchNorm makes the outputs of an example depend on the other ones.
  curvature = optim.Curvature(predict, params, data[:64], in_axes=None, **about)
  options = dict(damping=1e-3, norm_constraint=0.1, weight_decay=0.0)
  kfac = optim.kfac(falling(0.2, steps), curvature, factor_period=1, inverse_period=10, **options)
  both = {"adam": optax.adam(falling(0.06, steps)), "kfac": kfac}
  return {k: train(tx, predict, loss, params, draw, steps) for k, tx in both.items()}


if __name__ == "__main__":
  for example in (mlp, transformer, autoencoder):
    for name, losses in example().items():
      ends = f"{losses[0]:.3f} -> {losses[-10:].mean():.4f}"
      print(f"{example.__name__:12} {name}: loss {ends} in {len(losses)} steps", flush=True)
