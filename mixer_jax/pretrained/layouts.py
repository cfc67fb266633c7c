"""Peers' names and axes to ours; which layout a file has, its names say.

Linen's names are ours. PyTorch has dense kernels as [out, in] and convolutions
as [out, in, height, width]; ours are [in, out] and [height, width, in, out].
"""

import dataclasses
import logging
import re
from typing import Any, Callable, Mapping

import numpy as np

from mixer_jax.errors import UserError
from mixer_jax.pretrained import catalog
from mixer_jax.pretrained.catalog import Normalization

_LOG = logging.getLogger(__name__)

Arrays = dict[str, np.ndarray]

# Modules of the PyTorch layouts, i the number of the block, and their names here.
# A name that is itself a parameter becomes a scale.
_TIMM_MIXER = {
  "stem.proj": "stem",
  "blocks.i.norm1": "MixerBlock_i/LayerNorm_0",
  "blocks.i.mlp_tokens.fc1": "MixerBlock_i/token_mixing/Dense_0",
  "blocks.i.mlp_tokens.fc2": "MixerBlock_i/token_mixing/Dense_1",
  "blocks.i.norm2": "MixerBlock_i/LayerNorm_1",
  "blocks.i.mlp_channels.fc1": "MixerBlock_i/channel_mixing/Dense_0",
  "blocks.i.mlp_channels.fc2": "MixerBlock_i/channel_mixing/Dense_1",
  "norm": "pre_head_layer_norm",
  "head": "head",
}
_DEIT_RESMLP = {
  "patch_embed.proj": "stem",
  "blocks.i.norm1": "ResMlpBlock_i/norm1",
  "blocks.i.attn": "ResMlpBlock_i/cross_patch",
  "blocks.i.gamma_1": "ResMlpBlock_i/layer_scale_1",
  "blocks.i.norm2": "ResMlpBlock_i/norm2",
  "blocks.i.mlp.fc1": "ResMlpBlock_i/cross_channel/Dense_0",
  "blocks.i.mlp.fc2": "ResMlpBlock_i/cross_channel/Dense_1",
  "blocks.i.gamma_2": "ResMlpBlock_i/layer_scale_2",
  "norm": "norm",
  "head": "head",
}
_TIMM_RESMLP = {
  "stem.proj": "stem",
  "blocks.i.norm1": "ResMlpBlock_i/norm1",
  "blocks.i.linear_tokens": "ResMlpBlock_i/cross_patch",
  "blocks.i.ls1": "ResMlpBlock_i/layer_scale_1",
  "blocks.i.norm2": "ResMlpBlock_i/norm2",
  "blocks.i.mlp_channels.fc1": "ResMlpBlock_i/cross_channel/Dense_0",
  "blocks.i.mlp_channels.fc2": "ResMlpBlock_i/cross_channel/Dense_1",
  "blocks.i.ls2": "ResMlpBlock_i/layer_scale_2",
  "norm": "norm",
  "head": "head",
}
_TIMM_GMLP = {
  "stem.proj": "stem",
  "blocks.i.norm": "GmlpBlock_i/norm",
  "blocks.i.mlp_channels.fc1": "GmlpBlock_i/Dense_0",
  "blocks.i.mlp_channels.gate.norm": "GmlpBlock_i/spatial_gating/norm",
  "blocks.i.mlp_channels.gate.proj": "GmlpBlock_i/spatial_gating/Dense_0",
  "blocks.i.mlp_channels.fc2": "GmlpBlock_i/Dense_1",
  "norm": "norm",
  "head": "head",
}


_NORM = re.compile(r"/LayerNorm_(\d{1,9})/")


def _linen(arrays: Arrays) -> Arrays:
  return arrays


def _pre_linen(arrays: Arrays) -> Arrays:
  """Google's names before Linen: modules counted together, dense layers in one."""
  # Where a block has other modules between its two norms, they may count as well.
  counts = sorted({int(n) for name in arrays for n in _NORM.findall(name)})
  renamed = {}
  for name, array in arrays.items():
    name = re.sub(r"^embedding/", "stem/", name)
    name = re.sub(r"^Mixer/encoder_norm/", "pre_head_layer_norm/", name)
    name = re.sub(r"^Mixer/encoderblock_", "MixerBlock_", name)
    name = _NORM.sub(lambda m: f"/LayerNorm_{counts.index(int(m[1]))}/", name)
    match = re.fullmatch(r"(.*/\w+_mixing)_phase_0/(kernel|bias)([12])", name)
    if match:
      name = f"{match[1]}/Dense_{int(match[3]) - 1}/{match[2]}"
      array = array.squeeze()
    renamed[name] = array
  return renamed


def _torch(modules: Mapping[str, str]) -> Callable[[Arrays], Arrays]:
  def convert(arrays: Arrays) -> Arrays:
    return dict(_from_torch(name, array, modules) for name, array in arrays.items())

  return convert


def _from_torch(name: str, array: np.ndarray, modules: Mapping[str, str]) -> tuple[str, np.ndarray]:
  """Our name and axes; what is unknown keeps its name, and is refused later."""
  block = re.match(r"blocks\.(\d+)\.", name)
  general = re.sub(r"^blocks\.\d+\.", "blocks.i.", name)
  module, _, leaf = general.rpartition(".")
  if general in modules:
    module, leaf = general, "alpha"
  leaf = {"weight": "kernel" if array.ndim > 1 else "scale", "alpha": "scale", "beta": "bias"}.get(
    leaf, leaf
  )
  if module not in modules or leaf not in ("kernel", "scale", "bias"):
    return name, array
  ours = f"{modules[module]}/{leaf}"
  if block:
    ours = ours.replace("_i/", f"_{block[1]}/", 1)
  if array.ndim == 4:
    return ours, array.transpose(2, 3, 1, 0)
  return ours, array.T if leaf == "kernel" else array.reshape(-1)


@dataclasses.dataclass(frozen=True)
class Layout:
  """A way to name and lay out the parameters of a model.

  Attributes:
    title: for people.
    sign: a pattern that some name of such a file has, and none of the others.
    rename: takes the arrays to our names and axes.
    fields: of the model, which the peer fixes in its code.
    normalization: of the pixels, where the file is not known to want another.
  """

  title: str
  sign: str
  rename: Callable[[Arrays], Arrays]
  fields: dict[str, Any]
  normalization: Normalization | None


_GOOGLE = dict(gelu="tanh", layer_norm_epsilon=1e-6)
_TIMM = dict(gelu="exact", layer_norm_epsilon=1e-6)
_MINUS_ONE_TO_ONE, _IMAGENET = catalog.MINUS_ONE_TO_ONE, catalog.IMAGENET

LAYOUTS = {
  "linen": Layout("Google's Mixer", r"^MixerBlock_\d+/", _linen, _GOOGLE, _MINUS_ONE_TO_ONE),
  "pre_linen": Layout(
    "Google's Mixer before Linen", r"^Mixer/encoder", _pre_linen, _GOOGLE, _MINUS_ONE_TO_ONE
  ),
  "timm_mixer": Layout(
    "timm's Mixer",
    r"^blocks\.\d+\.mlp_tokens\.",
    _torch(_TIMM_MIXER),
    _TIMM,
    _MINUS_ONE_TO_ONE,
  ),
  "timm_resmlp": Layout(
    "timm's ResMLP",
    r"^blocks\.\d+\.linear_tokens\.",
    _torch(_TIMM_RESMLP),
    dict(gelu="exact", normalization="affine"),
    _IMAGENET,
  ),
  "deit_resmlp": Layout(
    "deit's ResMLP",
    r"^blocks\.\d+\.attn\.(weight|bias)$",
    _torch(_DEIT_RESMLP),
    dict(gelu="exact", normalization="affine"),
    _IMAGENET,
  ),
  "timm_gmlp": Layout(
    "timm's gMLP",
    r"^blocks\.\d+\.mlp_channels\.gate\.",
    _torch(_TIMM_GMLP),
    dict(gelu="exact", layer_norm_epsilon=1e-6, gate_epsilon=1e-5),
    _MINUS_ONE_TO_ONE,
  ),
  # What `save` writes of the other families; what they are is noted in the file.
  "own": Layout("this library's", r"^(ResMlp|Gmlp)Block_\d+/", _linen, {}, None),
}


def convert(path: str, arrays: Arrays) -> tuple[str, Arrays]:
  """Finds the layout of a file's arrays and gives them our names and axes.

  Args:
    path: for messages.
    arrays: by the file's names.

  Returns:
    The key of the layout in `LAYOUTS`, and the arrays, by paths like
    "MixerBlock_0/token_mixing/Dense_0/kernel". An array that the layout does not
    know keeps its name.

  Raises:
    UserError: the names are those of no layout, or two become one.
  """
  arrays = _unwrapped(arrays)
  for key, layout in LAYOUTS.items():
    if any(re.search(layout.sign, name) for name in arrays):
      renamed = layout.rename(arrays)
      if len(renamed) < len(arrays):
        raise UserError(f"{path}: two arrays have the same place in {layout.title}")
      return key, renamed
  some = ", ".join(sorted(arrays)[:4])
  titles = ", ".join(layout.title for layout in LAYOUTS.values())
  raise UserError(f"{path}: its {len(arrays)} arrays ({some}, ...) are in none of: {titles}")


def _unwrapped(arrays: Arrays) -> Arrays:
  """Without the prefixes of PyTorch's data parallelism and of DINO's training.

  DINO keeps the net as "backbone." beside its projection head, which is dropped.
  """
  if all(name.startswith("module.") for name in arrays):
    arrays = {name.removeprefix("module."): array for name, array in arrays.items()}
  backbone = {
    n.removeprefix("backbone."): a for n, a in arrays.items() if n.startswith("backbone.")
  }
  dropped = [name for name in arrays if name.startswith("head.")]
  if not backbone or len(backbone) + len(dropped) < len(arrays):
    return arrays
  if dropped:
    _LOG.info("Dropped the projection head of self-supervised training: %s", ", ".join(dropped))
  return backbone
