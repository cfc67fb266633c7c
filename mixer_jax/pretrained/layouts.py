"""Peers' names and axes to ours; the names of a file's arrays tell its layout.

Linen's names are ours. PyTorch has dense kernels as [out, in] and convolutions
as [out, in, height, width]; ours are [in, out] and [height, width, in, out].
"""

import functools
import logging
import re
from typing import Any, Callable, Mapping, NamedTuple

import numpy as np

from mixer_jax.errors import UserError
from mixer_jax.pretrained import catalog, convnets
from mixer_jax.pretrained.catalog import Normalization
from mixer_jax.pretrained.containers import Arrays

_LOG = logging.getLogger(__name__)

# Modules of a block, theirs and ours.
_TIMM_MIXER = {
  "norm1": "LayerNorm_0",
  "mlp_tokens.fc1": "token_mixing/Dense_0",
  "mlp_tokens.fc2": "token_mixing/Dense_1",
  "norm2": "LayerNorm_1",
  "mlp_channels.fc1": "channel_mixing/Dense_0",
  "mlp_channels.fc2": "channel_mixing/Dense_1",
}
_DEIT_RESMLP = {
  "norm1": "norm1",
  "attn": "cross_patch",
  "gamma_1": "layer_scale_1",
  "norm2": "norm2",
  "mlp.fc1": "cross_channel/Dense_0",
  "mlp.fc2": "cross_channel/Dense_1",
  "gamma_2": "layer_scale_2",
}
_TIMMS = {"attn": "linear_tokens", "gamma_1": "ls1", "gamma_2": "ls2"}
_TIMM_RESMLP = {
  _TIMMS.get(name, name.replace("mlp.", "mlp_channels.")): ours
  for name, ours in _DEIT_RESMLP.items()
}
_TIMM_GMLP = {
  "norm": "norm",
  "mlp_channels.fc1": "Dense_0",
  "mlp_channels.gate.norm": "spatial_gating/norm",
  "mlp_channels.gate.proj": "spatial_gating/Dense_0",
  "mlp_channels.fc2": "Dense_1",
}

_NORM = re.compile(r"/LayerNorm_(\d{1,9})/")


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
    if match := re.fullmatch(r"(.*/\w+_mixing)_phase_0/(kernel|bias)([12])", name):
      name = f"{match[1]}/Dense_{int(match[3]) - 1}/{match[2]}"
      array = array.squeeze()
    renamed[name] = array
  return renamed


def _names(
  stem: str,
  block: str,
  inside: Mapping[str, str],
  scale: str = "weight",
  bias: str = "bias",
  norm: str = "norm",
) -> dict[str, str]:
  """PyTorch's names of parameters to ours, "i" for a block's number, given those of modules."""
  blocks = {f"blocks.i.{name}": f"{block}_i/{ours}" for name, ours in inside.items()}
  names = {}
  for module, ours in ({stem: "stem"} | blocks | {"norm": norm, "head": "head"}).items():
    if "layer_scale" in ours:  # a parameter itself
      names[module] = f"{ours}/scale"
    elif module.rpartition(".")[2].startswith("norm"):
      names |= {f"{module}.{scale}": f"{ours}/scale", f"{module}.{bias}": f"{ours}/bias"}
    else:
      names |= {f"{module}.weight": f"{ours}/kernel", f"{module}.bias": f"{ours}/bias"}
  return names


def _from_torch(names: Mapping[str, str], arrays: Arrays) -> Arrays:
  """Arrays with our names and axes; an unknown one keeps its name, and is refused later."""
  renamed = {}
  for name, array in arrays.items():
    ours = names.get(re.sub(r"^blocks\.\d+\.", "blocks.i.", name))
    if ours and (block := re.match(r"blocks\.(\d+)\.", name)):
      ours = ours.replace("_i/", f"_{block[1]}/", 1)
    renamed[ours or name] = _our_axes(array, ours) if ours else array
  return renamed


def _our_axes(array: np.ndarray, ours: str) -> np.ndarray:
  if ours.endswith("/kernel"):
    return array.transpose(2, 3, 1, 0) if array.ndim == 4 else array.T
  # timm's affine vectors are [1, 1, channels]; any other shape stays, and is refused later.
  return array[0, 0] if array.ndim == 3 and array.shape[:2] == (1, 1) else array


class Layout(NamedTuple):
  """A way to name and lay out the parameters of a model.

  A file has it if a name matches `sign`. `fields` of the model are fixed by the peer's code, and
  so is `normalization`, unless the catalog knows another one of the file. `names` are the
  parameters' in PyTorch's files to ours, with "i" for the number of a block.
  """

  title: str
  sign: str
  rename: Callable[[Arrays], Arrays]
  fields: dict[str, Any]
  normalization: Normalization | None
  names: Mapping[str, str] = {}


def _torch(
  title: str,
  sign: str,
  names: Mapping[str, str],
  fields: dict[str, Any],
  normalization: Normalization = catalog.MINUS_ONE_TO_ONE,
) -> Layout:
  rename = functools.partial(_from_torch, names)
  return Layout(title, r"^blocks\.\d+\." + sign, rename, fields, normalization, names)


_GOOGLE = dict(gelu="tanh", layer_norm_epsilon=1e-6), catalog.MINUS_ONE_TO_ONE
_TIMM = dict(gelu="exact", layer_norm_epsilon=1e-6)
_GMLP = _TIMM | dict(gate_epsilon=1e-5)
_RESMLP = dict(gelu="exact", normalization="affine"), catalog.IMAGENET
_OWN = r"^(ResMlp|Gmlp|Basic|Bottleneck|RegNetY)Block_\d+/"
_timm_mixer = _names("stem.proj", "MixerBlock", _TIMM_MIXER, norm="pre_head_layer_norm")
_timm_resmlp = _names("stem.proj", "ResMlpBlock", _TIMM_RESMLP, "alpha", "beta")
_deit_resmlp = _names("patch_embed.proj", "ResMlpBlock", _DEIT_RESMLP, "alpha", "beta")
_timm_gmlp = _names("stem.proj", "GmlpBlock", _TIMM_GMLP)

LAYOUTS = {
  "linen": Layout("Google's Mixer", r"^MixerBlock_\d+/", dict, *_GOOGLE),
  "pre_linen": Layout("Google's Mixer before Linen", r"^Mixer/encoder", _pre_linen, *_GOOGLE),
  "timm_mixer": _torch("timm's Mixer", r"mlp_tokens\.", _timm_mixer, _TIMM),
  "timm_resmlp": _torch("timm's ResMLP", r"linear_tokens\.", _timm_resmlp, *_RESMLP),
  "deit_resmlp": _torch("deit's ResMLP", r"attn\.(weight|bias)$", _deit_resmlp, *_RESMLP),
  "timm_gmlp": _torch("timm's gMLP", r"mlp_channels\.gate\.", _timm_gmlp, _GMLP),
  "resnet": Layout("PyTorch's ResNet", r"^layer\d+\.\d+\.conv1\.", convnets.resnet, {}, None),
  "regnety": Layout("timm's RegNetY", r"^s\d+\.b\d+\.se\.", convnets.regnety, {}, catalog.IMAGENET),
  # `save` writes it of the other families; notes in the file name the fields.
  "own": Layout("this library's", _OWN, dict, {}, None),
}


def name_in_file(layout: str, path: str) -> str:
  """PyTorch's name of our parameter, of a block or of some ("Block_{0-2}/..."); "": none."""
  block = re.match(r"(\w+Block_)([^/]+)(/.+)", path)
  ours = f"{block[1]}i{block[3]}" if block else path
  theirs = {o: t for t, o in LAYOUTS[layout].names.items()}.get(ours, "")
  theirs = theirs.replace("blocks.i.", f"blocks.{block[2]}.") if block else theirs
  return f"{theirs}, transposed" if theirs and ours.endswith("/kernel") else theirs


def convert(path: str, arrays: Arrays) -> tuple[str, Arrays]:
  """The key in `LAYOUTS` of a file's layout, and its arrays with our names and axes.

  An array that the layout does not know keeps its name. If no layout has such names, or two
  arrays become one, a UserError names `path`.
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
  """Without the prefixes of PyTorch's data parallelism and of DINO, and its projection head."""
  if all(name.startswith("module.") for name in arrays):
    arrays = {name.removeprefix("module."): array for name, array in arrays.items()}
  prefix = "backbone."
  backbone = {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}
  dropped = [name for name in arrays if name.startswith("head.")]
  if not backbone or len(backbone) + len(dropped) < len(arrays):
    return arrays
  if dropped:
    _LOG.info("Dropped the projection head of self-supervised training: %s", ", ".join(dropped))
  return backbone
