"""Flax Linen layers announce themselves to K-FAC while a model is applied.

Inside `registered_layers()` every `nn.Dense`, every patch-embedding `nn.Conv`
and every `nn.LayerNorm` registers its own curvature block with kfac-jax. Any
Linen model works unchanged, in any compute dtype, and a model that is not
trained with K-FAC carries no trace of it. Automatic registration is not used:
it silently falls back to a diagonal block for layers in bfloat16.
"""

import contextlib
from typing import Any, Callable, Iterator

import flax.linen as nn
import jax
import kfac_jax


@contextlib.contextmanager
def registered_layers() -> Iterator[None]:
  """Within this context, applied Linen layers register their blocks."""
  with nn.intercept_methods(_register_layer):
    yield


def _register_layer(next_call: Callable, args, kwargs, context: nn.module.InterceptorContext):
  """Calls a layer's `__call__` and tags its output with its parameters."""
  module = context.module
  if context.method_name != "__call__" or module.is_initializing():
    return next_call(*args, **kwargs)
  for layer_type, register in _REGISTER.items():
    if type(module) is layer_type:
      return register(module, args[0], next_call(*args, **kwargs))
  return next_call(*args, **kwargs)


def _param(module: nn.Module, name: str) -> jax.Array | None:
  return module.get_variable("params", name) if module.has_variable("params", name) else None


def _register_dense(module: nn.Dense, x: jax.Array, y: jax.Array) -> jax.Array:
  return kfac_jax.register_dense(
    y, x, _param(module, "kernel"), _param(module, "bias"), variant="dense"
  )


def _pair(value: Any) -> tuple[Any, ...]:
  return (value, value) if value is None or isinstance(value, int) else tuple(value)


def _register_patches(module: nn.Conv, x: jax.Array, y: jax.Array) -> jax.Array:
  """A convolution whose stride is its kernel is a dense layer over patches."""
  size = _pair(module.kernel_size)
  plain = (
    len(size) == 2
    and _pair(module.strides or 1) == size
    and module.padding == "VALID"
    and module.feature_group_count == 1
    and _pair(module.input_dilation or 1) == _pair(module.kernel_dilation or 1) == (1, 1)
  )
  if not plain:  # left unregistered: reported by its path unless listed as plain
    return y
  b, h, w, d = y.shape
  patches = x[:, : h * size[0], : w * size[1]]
  patches = patches.reshape(b, h, size[0], w, size[1], -1).swapaxes(2, 3)
  return kfac_jax.register_dense(
    y,
    patches.reshape(b, h, w, -1),
    _param(module, "kernel"),
    _param(module, "bias"),
    variant="patches",
  )


def _register_norm(module: nn.LayerNorm, x: jax.Array, y: jax.Array) -> jax.Array:
  """Tags scale and shift of the normalised input, which Linen does not expose."""
  scale, bias = _param(module, "scale"), _param(module, "bias")
  if scale is None and bias is None:
    return y
  bare = module.clone(use_scale=False, use_bias=False, parent=None, name=None)
  normalised = bare.apply({}, x)
  z = normalised if scale is None else normalised * scale.astype(y.dtype)
  z = z if bias is None else z + bias.astype(y.dtype)
  return kfac_jax.register_scale_and_shift(z, normalised, scale, bias)


_REGISTER = {
  nn.Dense: _register_dense,
  nn.Conv: _register_patches,
  nn.LayerNorm: _register_norm,
}
