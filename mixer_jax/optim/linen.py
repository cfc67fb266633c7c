"""Flax Linen layers announce themselves to K-FAC while a model is applied.

Inside `registered_layers()` every `nn.Dense`, `nn.Conv` and `nn.LayerNorm`
registers its own curvature block with kfac-jax. Any Linen model works unchanged,
in any compute dtype, and a model that is not trained with K-FAC carries no trace
of it. Automatic registration is not used: it silently falls back to a diagonal
block for layers in bfloat16.

A layer with parameters of its own joins by the class attribute `curvature`:
"scale_and_shift" (y = x * scale + bias, parameters of these names, either may be
missing) or "gradient" (no block: the plain gradient).
"""

import contextlib
import math
import re
from typing import Any, Callable, Iterator, Sequence

import flax.linen as nn
import jax
import kfac_jax


@contextlib.contextmanager
def registered_layers(patterns: Sequence[str] = ()) -> Iterator[list[jax.Array]]:
  """Within this context, applied Linen layers register their blocks.

  A layer gets no block if all its parameters' paths match one of the regular expressions
  `patterns`. The list that is yielded fills with parameters that take the plain gradient.
  """
  plain = []
  with nn.intercept_methods(lambda *call: _register_layer(patterns, plain, *call)):
    yield plain


def _register_layer(
  patterns: Sequence[str], plain: list[jax.Array], next_call: Callable, args, kwargs, context
) -> Any:
  """Calls a layer's `__call__` and tags its output with its parameters."""
  module = context.module
  if context.method_name != "__call__" or module.is_initializing():
    return next_call(*args, **kwargs)
  declared = getattr(type(module), "curvature", None)
  grouped = type(module) is nn.Conv and module.feature_group_count > 1  # not a dense layer
  if declared == "gradient" or grouped or _is_listed(module, patterns):
    plain += _own_params(module).values()
  elif declared == "scale_and_shift":
    y = next_call(*args, **kwargs)
    return kfac_jax.register_scale_and_shift(y, args[0], *_params(module, "scale", "bias"))
  elif register := _REGISTER.get(type(module)):
    return register(module, args[0], next_call(*args, **kwargs))
  return next_call(*args, **kwargs)


def _own_params(module: nn.Module) -> dict[str, jax.Array]:
  params = module.variables.get("params", {})
  return {name: x for name, x in params.items() if not isinstance(x, dict)}


def _is_listed(module: nn.Module, patterns: Sequence[str]) -> bool:
  """Whether the caller wants no block for any of a layer's parameters."""
  paths = ["/".join((*module.path, name)) for name in _own_params(module)]
  return bool(paths) and all(any(re.search(p, path) for p in patterns) for path in paths)


def _params(module: nn.Module, *names: str) -> list[jax.Array | None]:
  return [_own_params(module).get(name) for name in names]


def _register_dense(module: nn.Dense, x: jax.Array, y: jax.Array) -> jax.Array:
  return kfac_jax.register_dense(y, x, *_params(module, "kernel", "bias"), variant="dense")


def _register_conv(module: nn.Conv, x: jax.Array, y: jax.Array) -> jax.Array:
  """A convolution is a dense layer over the patches that it sees."""
  if y.ndim != 4 or module.padding not in ("SAME", "VALID"):
    return y  # unregistered: reported by its path unless listed as plain
  patches = _patches(module, x)
  return kfac_jax.register_dense(y, patches, *_params(module, "kernel", "bias"), variant="patches")


def _patches(module: nn.Conv, x: jax.Array) -> jax.Array:
  """[batch, height, width, kh * kw * channels] in the order of the kernel."""
  size, strides = _pair(module.kernel_size), _pair(module.strides or 1)
  dilations = [_pair(d or 1) for d in (module.input_dilation, module.kernel_dilation)]
  if strides == size and module.padding == "VALID" and dilations == [(1, 1), (1, 1)]:
    h, w = x.shape[1] // size[0], x.shape[2] // size[1]
    x = x[:, : h * size[0], : w * size[1]].reshape(-1, h, size[0], w, size[1], x.shape[-1])
    return x.swapaxes(2, 3).reshape(-1, h, w, math.prod(size) * x.shape[-1])
  window, axes = (size, strides, module.padding, *dilations), ("NHWC", "HWIO", "NHWC")
  patches = jax.lax.conv_general_dilated_patches(x, *window, dimension_numbers=axes)
  patches = patches.reshape(*patches.shape[:3], x.shape[-1], -1)  # channels come first there
  return patches.swapaxes(3, 4).reshape(*patches.shape[:3], -1)


def _pair(value: Any) -> tuple[Any, ...]:
  return (value, value) if value is None or isinstance(value, int) else tuple(value)


def _register_norm(module: nn.LayerNorm, x: jax.Array, y: jax.Array) -> jax.Array:
  """Tags scale and shift of the normalised input, which Linen does not expose."""
  scale, bias = _params(module, "scale", "bias")
  if scale is None and bias is None:
    return y
  bare = module.clone(use_scale=False, use_bias=False, parent=None, name=None)
  normalised = bare.apply({}, x)
  z = normalised if scale is None else normalised * scale.astype(y.dtype)
  z = z if bias is None else z + bias.astype(y.dtype)
  return kfac_jax.register_scale_and_shift(z, normalised, scale, bias)


_REGISTER = {nn.Dense: _register_dense, nn.Conv: _register_conv, nn.LayerNorm: _register_norm}
