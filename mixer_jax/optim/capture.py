"""Statistics of layers from one forward and one backward pass of any Linen model.

Each layer's parameters get companions: zeros of the shapes of its statistics, in the same
tree. An interceptor ties them to the layer's output by a custom derivative: the gradient
with respect to a companion is the sum of the statistic over the layer's rows. Whatever a
model does with its parameters (`nn.scan`, `nn.remat`, `nn.vmap`, `jit`, a layer used twice)
it does with their companions, and JAX's own rules of differentiation stack, slice and add.
"""

from typing import Any, Callable, Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp

from mixer_jax.optim import layer_views, row_sums
from mixer_jax.optim.companions import Path, with_companions
from mixer_jax.optim.layer_calls import intercepted


def sums(
  predict: Callable, params: Any, companions: Mapping[Path, Any], batch: Any
) -> tuple[Any, Any, Callable[[Any], dict[Path, Any]]]:
  """Runs the model once, forward.

  Args:
    predict: maps (params, batch) to (outputs, aux).
    params: the parameters.
    companions: zeros by layer path, of `companion`'s structure.
    batch: the second argument of `predict`.

  Returns:
    The outputs, the aux, and a function from the gradient of the outputs to the sums of all
    statistics (`companion`'s structure).
  """

  def outputs(companions):
    with intercepted(_tie):
      return predict(with_companions(params, companions), batch)

  y, pullback, aux = jax.vjp(outputs, dict(companions), has_aux=True)
  return y, aux, lambda gradient: pullback(gradient)[0]


def companion(shapes: Mapping[str, tuple[int, ...]], stacked: tuple[int, ...]) -> dict[str, Any]:
  """Zeros for one layer; `shapes` of "inputs" and "outputs" of a dense one, or "scale", "bias"."""
  shapes = dict(shapes, rows=())
  return {name: jnp.zeros((*stacked, *shape), jnp.float32) for name, shape in shapes.items()}


def _tie(view: layer_views.View, module: nn.Module, companion: Any, args: tuple, y: Any) -> Any:
  """The output of a layer, whose gradient also goes to the layer's companion."""
  kind = "head" if getattr(view, "transposed", False) else "use"
  if kind not in companion:
    return y
  own = companion[kind]
  if own["rows"].dtype != jnp.float32:
    raise ValueError(
      f"the parameters of {'/'.join(module.path)} are cast to {own['rows'].dtype} inside"
      " predict; leave them float32 and give the layers a dtype"
    )
  if isinstance(view, layer_views.ScaleAndShift):
    return _tied(row_sums.of_norm, view.inputs(), y, own)
  statistics = lambda x, dy, own: row_sums.of_dense(view, x, dy, own)
  return _tied(statistics, args[0], y, own)


def _tied(statistics: Callable, x: jax.Array, y: jax.Array, own: Any) -> jax.Array:
  @jax.custom_vjp
  def tie(x, y, own):
    return y

  def forward(x, y, own):
    return y, (x, own)

  def backward(residuals, dy):
    x, own = residuals
    # Under `jax.vmap` JAX adds a cotangent up over the examples only if it depends on them: this 1
    # does, because it is computed from dy.
    one = jnp.where(dy.ravel()[:1].sum() == 0, 1.0, 1.0)
    sums = {name: one * s for name, s in statistics(x, dy, own).items()}
    return None, dy, jax.tree.map(jnp.zeros_like, own) | sums

  tie.defvjp(forward, backward)
  return tie(x, y, dict(own))
