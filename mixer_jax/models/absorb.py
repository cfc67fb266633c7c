"""ResMLP for inference: Aff and LayerScale folded into the layers beside them.

The paper (Section 2) says that Aff costs nothing at inference, since the adjacent linear layer can
absorb it. These steps are exact:

- Over channels, all of it: the second Aff goes into the first layer of the MLP, LayerScale into the
  last, the last Aff into the head (it commutes with the mean).
- Over patches, Aff and LayerScale act on channels and the matrix K [tokens in, tokens out], with
  bias a, on tokens. With Aff's scale s and bias b and LayerScale l,

    l_c (sum_u K_ut (s_c x_uc + b_c) + a_t) = l_c s_c sum_u K_ut x_uc + l_c (b_c r_t + a_t)

  where r_t = sum_u K_ut. Both scales become one, after K, and all biases one term
  over tokens and channels. K cannot take the scale in: all channels share it. The
  preceding layers cannot take b over without dividing by s, which may be zero.
- A convolution over patches takes both scales into its kernel. The term over tokens
  and channels stays, for its zero padding makes b count less at the border.
- The MLP over patches keeps its Aff and LayerScale: GELU stands between them, and
  the channels share its matrices.

A block so loses 5 of its 11 additions and multiplications per value and gains tokens x channels
numbers (S12 at 224x224: 6% of the parameters). XLA fuses most of such operations with others:
expect a few per cent of the time at most.
"""

from typing import Any, ClassVar

import jax
import numpy as np

from mixer_jax.models import blocks, layers, resmlp
from mixer_jax.options import pair

Params = dict[str, Any]


class _Absorbed:
  """Norms and scales of absorbed blocks; the MLP over patches keeps its own."""

  use_bias: ClassVar[bool] = False

  def _norm(self, x: jax.Array, name: str) -> jax.Array:
    return super()._norm(x, name) if self._stays(name) else x

  def _scaled(self, y: jax.Array, name: str) -> jax.Array:
    if name == "layer_scale_2":
      return y
    if self._stays(name):
      return super()._scaled(y, name)
    linear = self.patch_communication == "linear"
    # Each token has a bias of its own.
    return layers.Affine(1.0 if linear else None, 2, self.dtype, name="token_affine")(y)

  def _stays(self, name: str) -> bool:
    return self.patch_communication == "mlp" and name in ("norm1", "layer_scale_1")


# Named as the blocks that they stand for, so that parameters keep their paths.
class ResMlpBlock(_Absorbed, resmlp.ResMlpBlock):
  """`resmlp.ResMlpBlock` with its affine layers absorbed."""


class ClassMlpBlock(_Absorbed, resmlp.ClassMlpBlock):
  """`resmlp.ClassMlpBlock` with its affine layers absorbed."""

  patch_communication: ClassVar[str] = "linear"


class AbsorbedResMlp(resmlp.ResMlp, kw_only=True):
  """A `resmlp.ResMlp` after `absorb_affine`.

  `image_size` is height and width of the images; None: only their number of patches matters.
  """

  layer_scale_init: float = 1.0
  image_size: tuple[int, int] | None = None
  block, class_block = ResMlpBlock, ClassMlpBlock

  def __call__(self, images: jax.Array, *, train: bool = False) -> jax.Array:
    """As `resmlp.ResMlp` does.

    Raises:
      ValueError: the images are not of image_size.
    """
    if self.image_size not in (None, images.shape[1:3]):
      height, width = self.image_size
      raise ValueError(f"images have shape {images.shape}; known: [batch, {height}, {width}, 3]")
    return super().__call__(images, train=train)

  def pool(self, x: jax.Array) -> jax.Array:
    return self._pooled(x)  # the last Aff is in the head


def absorb_affine(
  model: resmlp.ResMlp, params: Params, image_size: tuple[int, int] | None = None
) -> tuple[AbsorbedResMlp, Params]:
  """Folds Aff and LayerScale of a ResMLP into the neighbouring layers, for inference.

  Args:
    model: a ResMLP with normalization "affine".
    params: its parameters, with a head; scanned blocks come out unrolled.
    image_size: height and width of the images; used only where patches communicate by convolutions,
      whose zero padding it places.

  Returns:
    A model and its parameters (NumPy, float32) with the outputs of the given ones.

  Raises:
    ValueError: the model has LayerNorm, which no linear layer can absorb, or image_size is missing
      where it is needed.

  Example:
    ```python
    import jax
    import jax.numpy as jnp
    from mixer_jax import models

    model = models.build("resmlp_s12", num_classes=10, num_blocks=1, hidden_dim=8)
    images = jnp.ones((1, 32, 32, 3))
    params = jax.jit(model.init)(jax.random.key(0), images)["params"]
    model, params = models.absorb_affine(model, params)
    logits = model.apply({"params": params}, images)
    ```
  """
  if model.normalization != "affine":
    raise ValueError(f"normalization is {model.normalization!r}; only 'affine' can be absorbed")
  kind, grid = model.patch_communication, None
  if kind not in ("conv3x3", "depthwise", "separable"):
    image_size = None
  elif image_size is None:
    raise ValueError(f"image_size is None; patch_communication {kind!r} needs (height, width)")
  else:
    image_size = (image_size[0], image_size[1])  # a list would not be hashable
    grid = tuple(n // side for n, side in zip(image_size, pair(model.patch_size)))
  params = jax.tree.map(lambda x: np.asarray(x, np.float64), blocks.unrolled(params))
  absorbed = {name: layer for name, layer in params.items() if name != "norm"}
  absorbed["head"] = _after_affine(params["norm"], params["head"])
  for name, block in params.items():
    if name.startswith("ResMlpBlock_"):
      absorbed[name] = _cross_patch(block, kind, grid) | _cross_channel(block)
    elif name.startswith("ClassMlpBlock_"):
      absorbed[name] = _cross_patch(block, "linear", None) | _cross_channel(block)
  fields = blocks.fields_of(model, AbsorbedResMlp)
  fields |= dict(layer_scale_init=1.0, image_size=image_size, scan_blocks=False, remat=False)
  return AbsorbedResMlp(**fields), jax.tree.map(np.float32, absorbed)


def _after_affine(affine: Params, dense: Params) -> Params:
  """Aff, then Dense, as one Dense."""
  return {
    "kernel": affine["scale"][:, None] * dense["kernel"],
    "bias": affine["bias"] @ dense["kernel"] + dense["bias"],
  }


def _cross_channel(block: Params) -> Params:
  mlp, scale = block["cross_channel"], block["layer_scale_2"]["scale"]
  first = _after_affine(block["norm2"], mlp["Dense_0"])
  last = jax.tree.map(lambda x: x * scale, mlp["Dense_1"])
  return {"cross_channel": {"Dense_0": first, "Dense_1": last}}


def _cross_patch(block: Params, kind: str, grid: tuple[int, int] | None) -> Params:
  if kind == "none":
    return {}
  if kind == "mlp":
    return {name: block[name] for name in ("norm1", "cross_patch", "layer_scale_1")}
  scale, shift = block["norm1"]["scale"], block["norm1"]["bias"]
  post = block["layer_scale_1"]["scale"]
  kernel, bias = block["cross_patch"]["kernel"], block["cross_patch"]["bias"]
  if kind == "linear":
    moved = post * (np.outer(kernel.sum(0), shift) + bias[:, None])
    affine = {"scale": scale * post, "bias": moved}
    return {"cross_patch": {"kernel": kernel}, "token_affine": affine}
  moved = _constant_image(kernel, shift, grid) + bias
  # The inputs of a kernel are its third axis, or per channel its fourth.
  kernel = kernel * (scale[:, None] if kind == "conv3x3" else scale)
  if kind != "separable":
    return {"cross_patch": {"kernel": kernel * post}, "token_affine": {"bias": moved * post}}
  pointwise = jax.tree.map(lambda x: x * post, block["cross_patch_pointwise"])
  return {
    "cross_patch": {"kernel": kernel},
    "cross_patch_pointwise": {"kernel": pointwise["kernel"]},
    "token_affine": {"bias": moved @ pointwise["kernel"] + pointwise["bias"]},
  }


def _constant_image(kernel: np.ndarray, pixel: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
  """[height * width, channels]: a zero padded 3x3 convolution of an image of one pixel value."""
  taps = (pixel[:, None] * kernel if kernel.shape[2] > 1 else pixel * kernel).sum(2)
  inside = np.pad(np.ones(grid), 1)
  windows = np.lib.stride_tricks.sliding_window_view(inside, (3, 3))  # [height, width, 3, 3]
  return np.einsum("hwyx,yxc->hwc", windows, taps).reshape(-1, kernel.shape[3])
