"""Linen layers as K-FAC sees them: y = a W + b over rows a, for matrices W.

`view` turns a call of a layer into one of

- `Dense`: its kernel is a matrix over the rows that it multiplies. A convolution is a dense
  layer over the patches that it sees, an embedding over one-hot rows.
- `ScaleAndShift`: y = x * scale + bias, normalisations among them.
- `Plain`: no curvature; the reason is told where the user did not ask for it.

A layer with parameters of its own joins by the class attribute `curvature`: "dense"
(y = x @ kernel + bias over the last axis; of shorter inputs by the leading part of the
kernel, with outputs as long), "scale_and_shift" (parameters of these names,
either may be missing) or "gradient" (the plain gradient).
"""

import dataclasses
import inspect
import math
import string
from typing import Any, Callable, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from mixer_jax.optim.companions import COMPANION


class Dense(NamedTuple):
  """A call of a layer whose kernel is a matrix over rows.

  Attributes:
    inputs: from the layer's argument to rows a [..., d_in], or int ids [...] if `ids`.
    outputs: from its result, or the gradient of it, to rows [..., d_out].
    kernel: name of the kernel.
    bias: name of the bias; None if there is none.
    axes: permutation of the kernel's axes that puts inputs before outputs; (): as it is.
    inputs_rank: number of input axes of the kernel; None: all but the last.
    patches: whether rows are a convolution's patches.
    ids: whether rows are one-hot, given by their ids (an embedding).
    transposed: whether W is the kernel's transpose (an embedding used as a head).
  """

  inputs: Callable[[jax.Array], jax.Array] = lambda x: x
  outputs: Callable[[jax.Array], jax.Array] = lambda y: y
  kernel: str = "kernel"
  bias: str | None = None
  axes: tuple[int, ...] = ()
  inputs_rank: int | None = None
  patches: bool = False
  ids: bool = False
  transposed: bool = False


class ScaleAndShift(NamedTuple):
  """A call y = x * scale + bias; `inputs` gives x [batch, ...] of the layer's argument."""

  inputs: Callable[[], jax.Array]
  scale: str | None
  bias: str | None


class Plain(NamedTuple):
  """A layer without curvature; `reason` is empty where that is the layer's own wish."""

  reason: str = ""


class LayerError(ValueError):
  """A layer that K-FAC cannot take as it is."""


View = Dense | ScaleAndShift | Plain


def without_functions(view: View) -> View:
  """The view without `inputs` and `outputs`, which may hold arrays of a trace."""
  return view._replace(**dict.fromkeys({"inputs", "outputs"} & set(view._fields)))


def view(context: nn.module.InterceptorContext, args: tuple, kwargs: dict) -> View | None:
  """The view of a call, or None if it is no layer that K-FAC knows.

  A subclass that calls the method of its base is seen there.
  """
  module, method = context.module, context.orig_method.func
  declared = getattr(type(module), "curvature", None)
  if declared is not None:
    if declared not in DECLARED:
      raise LayerError(
        f"{type(module).__name__}.curvature is {declared!r}; allowed: {', '.join(DECLARED)}"
      )
    known = DECLARED[declared] if context.method_name == "__call__" else None
    args, kwargs = args[:1], {}
  else:
    known = _LAYERS.get(method)
  if known is DECLARED["gradient"]:  # whatever it takes
    return known(module)
  if known and (not args or isinstance(args[0], list | tuple)):
    given = f"a {type(args[0]).__name__}" if args else "keywords alone"
    raise LayerError(
      f"{type(module).__name__} takes {given}; allowed: an array, by position, or its parameters"
      " listed in `plain`"
    )
  if known and jnp.iscomplexobj(args[0]):  # its gradients are no products of its rows
    gradient = known in (_norm, _declared_norm, _scale_and_shift)
    return Plain("" if gradient else f"a {type(module).__name__} of complex numbers")
  return known(module, *args, **kwargs) if known else None


def own_params(module: nn.Module) -> dict[str, Any]:
  """The parameters of a module itself, without those of its submodules."""
  params = module.variables.get("params", {})
  return {name: x for name, x in params.items() if not hasattr(x, "items")}


def _has(module: nn.Module, name: str) -> str | None:
  """The name, if the module has such a parameter and uses it: a tree may hold more."""
  used = getattr(module, f"use_{name}", True)  # Linen asks for its truth; elsewhere None may differ
  unused = used is False or (not hasattr(module, "curvature") and not used)
  return name if name in own_params(module) and not unused else None


def _dense(module: nn.Module, x: jax.Array) -> Dense:
  return Dense(bias=_has(module, "bias"))


def _declared_dense(module: nn.Module, x: jax.Array) -> Dense:
  """Zeros stand for the missing ends of inputs and outputs, as if all of the kernel acted."""
  sizes = getattr(own_params(module).get("kernel"), "shape", ())
  if len(sizes) != 2:
    raise _declared_wrongly(module, "dense", "a matrix of the name kernel, and a bias")
  longer = lambda size: lambda y: jnp.pad(y, [(0, 0)] * (y.ndim - 1) + [(0, size - y.shape[-1])])
  return Dense(*map(longer, sizes), bias=_has(module, "bias"))


def _declared_norm(module: nn.Module, x: jax.Array) -> ScaleAndShift:
  if own_params(module) and not (_has(module, "scale") or _has(module, "bias")):
    raise _declared_wrongly(module, "scale_and_shift", "a scale and a bias, of these names")
  return _scale_and_shift(module, x)


def _declared_wrongly(module: nn.Module, declared: str, allowed: str) -> LayerError:
  own = {name: x for name, x in own_params(module).items() if name != COMPANION}
  own = ", ".join(f"{name} {list(x.shape)}" for name, x in own.items()) or "none"
  return LayerError(
    f"{type(module).__name__}.curvature is {declared!r}, but its parameters are {own}; allowed: {allowed}"
  )


def _scale_and_shift(module: nn.Module, x: jax.Array) -> ScaleAndShift:
  return ScaleAndShift(lambda: x, _has(module, "scale"), _has(module, "bias"))


def _dense_general(module: nn.DenseGeneral, x: jax.Array) -> Dense | Plain:
  if module.batch_dims not in ((), []):  # an axis 0 counts
    return Plain("an nn.DenseGeneral with batch_dims")
  axes = module.axis if isinstance(module.axis, tuple | list) else (module.axis,)
  features = module.features if isinstance(module.features, tuple | list) else (module.features,)
  inner, outer = len(axes), len(features)

  def inputs(x):
    # Linen sorts its axes: so are those of the kernel.
    x = jnp.moveaxis(x, sorted(a % x.ndim for a in axes), range(-inner, 0))
    return x.reshape(*x.shape[:-inner], -1)

  outputs = lambda y: y.reshape(*y.shape[:-outer], -1)
  return Dense(inputs, outputs, bias=_has(module, "bias"), inputs_rank=inner)


def _einsum(module: nn.Einsum, x: jax.Array, einsum_str: str | None = None) -> Dense | Plain:
  """A matrix product, if no axis is shared by inputs, kernel and outputs."""
  operands, result = (einsum_str or module.einsum_str).replace(" ", "").split("->")
  if "..." in operands.partition(",")[0] and "..." in result:  # the axes that are not named
    letters = [c for c in string.ascii_letters if c not in operands]
    axes = "".join(letters[: x.ndim - len(operands.partition(",")[0]) + 3])
    operands, result = operands.replace("...", axes, 1), result.replace("...", axes, 1)
  left, right = operands.split(",")
  summed = [c for c in left if c in right and c not in result]
  rows = [c for c in result if c in left and c not in right]
  free = [c for c in result if c in right and c not in left]
  product = set(left) == {*rows, *summed} and set(right) == {*summed, *free}
  repeated = len(set(left)) < len(left) or len(set(right)) < len(right)
  if "." in operands or not product or repeated:
    return Plain(f"an nn.Einsum {einsum_str or module.einsum_str}, which is no matrix product")
  flat = lambda name, order, n: lambda x: _flat(jnp.einsum(f"{name}->{''.join(order)}", x), n)
  return Dense(
    flat(left, rows + summed, len(summed)),
    flat(result, rows + free, len(free)),
    bias=_has(module, "bias"),
    axes=tuple(right.index(c) for c in summed + free),
    inputs_rank=len(summed),
  )


def _flat(x: jax.Array, axes: int) -> jax.Array:
  """Merges the last axes."""
  return x.reshape(*x.shape[: x.ndim - axes], -1)


def _conv(module: nn.Conv, x: jax.Array) -> Dense | Plain:
  if not isinstance(module, nn.Conv):
    return Plain("an nn.ConvLocal, whose kernel is no matrix over patches")
  if module.feature_group_count > 1:
    return Plain("a grouped nn.Conv")
  if module.mask is not None:
    return Plain("an nn.Conv with a mask")
  return Dense(lambda x: _patches(module, x), bias=_has(module, "bias"), patches=True)


def _patches(module: nn.Conv, x: jax.Array) -> jax.Array:
  """[batch, places, size of the kernel * channels], in the order of the kernel's axes."""
  size = _tuple(module.kernel_size, 1)
  rank, channels = len(size), x.shape[-1]
  every = lambda value: _tuple(value, rank)
  dilated = {*every(module.input_dilation), *every(module.kernel_dilation)} - {1}
  if every(module.strides) == size and module.padding == "VALID" and not dilated:
    return _blocks(x.reshape(-1, *x.shape[-rank - 1 :]), size)
  # The layer itself, with a kernel that copies each entry of a patch, gives them for any
  # padding, stride and dilation. Each channel is a group of its own.
  entries = math.prod(size)
  kernel = jnp.eye(entries, dtype=x.dtype).reshape(*size, 1, 1, entries)
  kernel = jnp.broadcast_to(kernel, (*size, 1, channels, entries))
  copy = _exact(module, nn.Conv, features=channels * entries, feature_group_count=channels)
  y = copy.apply({"params": {"kernel": kernel.reshape(*size, 1, channels * entries)}}, x)
  y = y.reshape(-1, *y.shape[-rank - 1 : -1], channels, entries)
  return y.swapaxes(-2, -1).reshape(*y.shape[:-2], -1)


def _blocks(x: jax.Array, size: tuple[int, ...]) -> jax.Array:
  """Patches that neither overlap nor leave gaps, of [batch, *space, channels]."""
  rank = len(size)
  counts = [n // k for n, k in zip(x.shape[1:], size)]
  x = x[(slice(None), *(slice(n * k) for n, k in zip(counts, size)))]
  x = x.reshape(len(x), *(s for pair in zip(counts, size) for s in pair), x.shape[-1])
  order = [0, *range(1, 2 * rank, 2), *range(2, 2 * rank + 1, 2), 2 * rank + 1]
  return x.transpose(order).reshape(len(x), *counts, -1)


def _conv_transpose(module: nn.ConvTranspose, x: jax.Array) -> Dense | Plain:
  if module.mask is not None:
    return Plain("an nn.ConvTranspose with a mask")
  size = _tuple(module.kernel_size, 1)
  rank, swapped = len(size), module.transpose_kernel

  def inputs(x):
    entries = math.prod(size) * x.shape[-1]
    kernel = jnp.eye(entries, dtype=x.dtype).reshape(*size, x.shape[-1], entries)
    kernel = kernel.swapaxes(-2, -1) if swapped else kernel
    layer = _exact(module, nn.ConvTranspose, features=entries)
    y = layer.apply({"params": {"kernel": kernel}}, x)
    return y.reshape(-1, *y.shape[-rank - 1 :])

  axes = (*range(rank), rank + 1, rank) if swapped else ()
  return Dense(inputs, bias=_has(module, "bias"), axes=axes, inputs_rank=rank + 1, patches=True)


def _exact(module: nn.Module, base: type[nn.Module], **changes: Any) -> nn.Module:
  """The same convolution without a bias, exact on every device."""
  return _bare(module, base, use_bias=False, dtype=None, precision="highest", **changes)


def _bare(module: nn.Module, base: type[nn.Module], **changes: Any) -> nn.Module:
  """The layer of a Linen class that a module is, free of any scope.

  A subclass may change inputs and outputs, and a view is of the call of its base.
  """
  fields = {f.name for f in dataclasses.fields(base) if f.init} - {"parent", "name"}
  return base(**{name: getattr(module, name) for name in fields} | changes, parent=None)


def _tuple(value: Any, rank: int) -> tuple[int, ...]:
  return (value or 1,) * rank if value is None or isinstance(value, int) else tuple(value)


def _embed(module: nn.Embed, ids: jax.Array) -> Dense:
  return Dense(kernel="embedding", ids=True)


def _attend(module: nn.Embed, query: jax.Array) -> Dense:
  return Dense(kernel="embedding", transposed=True)


def _norm(module: nn.Module, *args: Any, **kwargs: Any) -> ScaleAndShift | Plain:
  """Linen does not expose the normalised input: the layer without parameters gives it.

  `Plain` where the features are not on the last axes, along which a `ScaleAndShift` is taken to act.
  """
  features = getattr(module, "feature_axes", getattr(module, "axis", -1))
  features = (features,) if isinstance(features, int) else tuple(features)
  rank = args[0].ndim
  if sorted(axis % rank for axis in features) != list(range(rank - len(features), rank)):
    return Plain()

  def inputs():
    flags = [name for name in ("use_scale", "use_bias") if hasattr(module, name)]
    base = next(norm for norm in _NORMS if isinstance(module, norm))
    bare = _bare(module, base, **dict.fromkeys(flags, False))
    rest = {name: x for name, x in module.variables.items() if name != "params"}
    return bare.apply(rest, *args, mutable=list(rest), **kwargs)[0]

  return ScaleAndShift(inputs, _has(module, "scale"), _has(module, "bias"))


_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm, nn.InstanceNorm)
DECLARED = {
  "dense": _declared_dense,
  "scale_and_shift": _declared_norm,
  "gradient": lambda module: Plain(),
}
# By the function that computes the layer, which a subclass may call.
_LAYERS = {inspect.unwrap(norm.__call__): _norm for norm in _NORMS} | {
  inspect.unwrap(nn.Dense.__call__): _dense,
  inspect.unwrap(nn.DenseGeneral.__call__): _dense_general,
  inspect.unwrap(nn.Einsum.__call__): _einsum,
  inspect.unwrap(nn.Conv.__call__): _conv,
  inspect.unwrap(nn.ConvTranspose.__call__): _conv_transpose,
  inspect.unwrap(nn.Embed.__call__): _embed,
  inspect.unwrap(nn.Embed.attend): _attend,
}
