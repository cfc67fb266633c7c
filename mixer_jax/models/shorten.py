"""Parameters of an encoder of text for shorter sequences."""

from typing import Any

from flax import traverse_util
import jax

from mixer_jax.errors import UserError
from mixer_jax.models.blocks import stacked, unrolled
from mixer_jax.models.roles import token_axes


def shortened(params: Any, max_length: int) -> Any:
  """Cuts the parameters of an encoder of text to those of the same function of shorter sequences.

  Matrices over tokens keep their leading parts, Toeplitz ones their central diagonals, BERT's
  positions their first rows.

  Args:
    params: parameters of an encoder, or of a model that has one as "encoder"; unrolled or scanned.
    max_length: `max_length` of the encoder that gets the result.

  Returns:
    A tree like `params`.

  Raises:
    UserError: the parameters are for shorter sequences, or of a model that changes with its
      max_length: ResMLP's "mlp" over tokens and Mixer's attention.

  Example:
    ```python
    import jax
    import jax.numpy as jnp
    from mixer_jax import models

    model = models.encoder("gmlp_text_small", vocab_size=11, max_length=8, num_blocks=1)
    ids, mask = jnp.ones((2, 8), int), jnp.ones((2, 8), bool)
    params = jax.jit(model.init)(jax.random.key(0), ids, mask)["params"]
    params = models.shortened(params, max_length=4)
    tokens = model.clone(max_length=4).apply({"params": params}, ids[:, :4], mask[:, :4])
    ```
  """
  tree = unrolled(params)
  flat = traverse_util.flatten_dict(tree, sep="/")
  cut = {path: _cut(path, array, max_length) for path, array in flat.items()}
  cut = traverse_util.unflatten_dict(cut, sep="/")
  same = jax.tree.structure(tree) == jax.tree.structure(params)
  return cut if same else stacked(cut)


def _axes(path: str) -> tuple[str, ...]:
  """As `token_axes`, with parameters that only sequences have: "diagonals" are 2n - 1."""
  if path.endswith("/ToeplitzDense_0/diagonals"):
    return ("diagonals",)
  if path.endswith("/ToeplitzDense_0/bias"):
    return ("out",)
  if f"/{path}".endswith("/positions/embedding"):
    return ("in", "channels")
  if f"/{path}".endswith(("/cross_patch/Dense_0/kernel", "/token_mixing/q/kernel")):
    raise UserError(
      f"{path}: its layer changes with max_length; leave max_length as it was in training"
    )
  return token_axes(path)


def _cut(path: str, array: Any, length: int) -> Any:
  for i, axis in enumerate(_axes(path)):
    if axis in ("hidden", "channels"):
      continue
    size = array.shape[i]
    if axis == "diagonals":
      size = (size + 1) // 2
    if not 1 <= length <= size:
      raise UserError(f"max_length is {length}; allowed: 1 to {size}, that of {path}")
    start, count = (size - length, 2 * length - 1) if axis == "diagonals" else (0, length)
    array = jax.lax.slice_in_dim(array, start, start + count, axis=i)
  return array
