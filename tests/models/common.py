"""What tests of models share: trees of parameters, and programs that give logits and tokens."""

import functools

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np


def flat(tree):
  """The leaves of a tree by path, as "stem/kernel"."""
  return traverse_util.flatten_dict(tree, sep="/")


def count(tree):
  return sum(x.size for x in jax.tree.leaves(tree))


def tree_of(model, *inputs):
  """The shapes of a model's parameters."""
  return jax.eval_shape(model.init, jax.random.key(0), *inputs)["params"]


def shapes_of(model, *size):
  """The shapes of the parameters of a model of images of this size, by path."""
  size = size * (3 - len(size)) if len(size) == 1 else size
  return {k: x.shape for k, x in flat(tree_of(model, jnp.zeros((1, *size, 3)))).items()}


def randomised(model, *inputs, seed=1, mean=0.2, scale=0.3):
  """Parameters of the model's tree, all non-trivial."""
  rng = np.random.default_rng(seed)
  draw = lambda x: rng.normal(mean, scale, x.shape).astype(np.float32)
  return jax.tree.map(draw, tree_of(model, *inputs))


def images_of(*shape):
  return np.random.default_rng(0).normal(size=(*shape, 3)).astype(np.float32)


@functools.cache
def _program(model, options):
  return jax.jit(functools.partial(model.apply, mutable=["intermediates"], **dict(options)))


def run(model, params, images, key=None, **options):
  """Logits and tokens, from one compiled program; a key drops with it."""
  rngs = {} if key is None else {"rngs": {"dropout": jax.random.key(key)}}
  program = _program(model, (*options.items(), *([("train", True)] if rngs else ())))
  logits, state = program({"params": params}, images, **rngs)
  return logits, np.asarray(state["intermediates"]["tokens"][0])


def patches(images, patch, stem):
  """NumPy's tokens of images: rows of patches from the top, each from the left."""
  b, h, w, _ = images.shape
  x = images.reshape(b, h // patch, patch, w // patch, patch, 3).swapaxes(2, 3)
  kernel = stem["kernel"].reshape(patch * patch * 3, -1)
  return x.reshape(b, -1, patch * patch * 3) @ kernel + stem["bias"]


def layer_norm(x, layer, epsilon):
  """NumPy's LayerNorm over the last axis."""
  mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
  return (x - mean) / np.sqrt(var + epsilon) * layer["scale"] + layer["bias"]
