"""Layouts of public files; the names of a file's arrays tell which one it has."""

import re
from typing import Any, Callable, NamedTuple

from mixer_jax.errors import UserError
from mixer_jax.pretrained import catalog
from mixer_jax.pretrained.catalog import Normalization
from mixer_jax.pretrained.containers import Arrays
from mixer_jax.pretrained.names import AFFINE, NORM, Names, unwrapped

# Modules, theirs and ours: of the whole network, and of a block.
_TIMM = {"stem.proj": "stem", "norm": "norm", "head": "head"}
_DEIT = {"patch_embed.proj": "stem", "norm": "norm", "head": "head"}
_MIXER_BLOCK = {
  "norm1": "LayerNorm_0",
  "mlp_tokens.fc1": "token_mixing/Dense_0",
  "mlp_tokens.fc2": "token_mixing/Dense_1",
  "norm2": "LayerNorm_1",
  "mlp_channels.fc1": "channel_mixing/Dense_0",
  "mlp_channels.fc2": "channel_mixing/Dense_1",
}
_DEIT_BLOCK = {
  "norm1": "norm1",
  "attn": "cross_patch",
  "gamma_1": "layer_scale_1",
  "norm2": "norm2",
  "mlp.fc1": "cross_channel/Dense_0",
  "mlp.fc2": "cross_channel/Dense_1",
  "gamma_2": "layer_scale_2",
}
_RESMLP_BLOCK = {
  "norm1": "norm1",
  "linear_tokens": "cross_patch",
  "ls1": "layer_scale_1",
  "norm2": "norm2",
  "mlp_channels.fc1": "cross_channel/Dense_0",
  "mlp_channels.fc2": "cross_channel/Dense_1",
  "ls2": "layer_scale_2",
}
_GMLP_BLOCK = {
  "norm": "norm",
  "mlp_channels.fc1": "Dense_0",
  "mlp_channels.gate.norm": "spatial_gating/norm",
  "mlp_channels.gate.proj": "spatial_gating/Dense_0",
  "mlp_channels.fc2": "Dense_1",
}
_RESNET = {"conv1": "stem", "bn1": "stem_norm", "fc": "head"}
_RESNET_BLOCK = {"downsample.0": "shortcut", "downsample.1": "shortcut_norm"}
_RESNET_BLOCK |= {f"conv{i}": f"conv{i}" for i in "123"} | {f"bn{i}": f"norm{i}" for i in "123"}
_REGNET = {"stem.conv": "stem", "stem.bn": "stem_norm", "head.fc": "head"}
_REGNET_BLOCK = {"downsample.conv": "shortcut", "downsample.bn": "shortcut_norm"}
_REGNET_BLOCK |= {"se.fc1": "squeeze", "se.fc2": "excite"}
_REGNET_BLOCK |= {f"conv{i}.conv": f"conv{i}" for i in "123"}
_REGNET_BLOCK |= {f"conv{i}.bn": f"norm{i}" for i in "123"}


def _pre_linen(arrays: Arrays) -> Arrays:
  """Google's names before Linen: modules counted together, dense layers in one."""
  # Where a block has other modules between its two norms, they may count as well.
  norm = re.compile(r"/LayerNorm_(\d+)/")
  counts = sorted({int(n) for name in arrays for n in norm.findall(name)})
  renamed = {}
  for name, array in arrays.items():
    name = re.sub(r"^embedding/", "stem/", name)
    name = re.sub(r"^Mixer/encoder_norm/", "pre_head_layer_norm/", name)
    name = re.sub(r"^Mixer/encoderblock_", "MixerBlock_", name)
    name = norm.sub(lambda m: f"/LayerNorm_{counts.index(int(m[1]))}/", name)
    if match := re.fullmatch(r"(.*/\w+_mixing)_phase_0/(kernel|bias)([12])", name):
      name = f"{match[1]}/Dense_{int(match[3]) - 1}/{match[2]}"
      array = array.squeeze()
    renamed[name] = array
  return renamed


class Layout(NamedTuple):
  """A way to name and lay out the parameters of a model.

  A file has the layout if a name matches `sign`, maybe behind the names of wrappers. The peer's code fixes `fields` of the model, and
  `normalization` unless the catalog knows another one of the file.
  """

  title: str
  sign: str
  fields: dict[str, Any]
  normalization: Normalization | None
  rename: Callable[[Arrays], Arrays] = dict  # to our names and axes
  theirs: Callable[[str], str] = lambda path: ""  # the peer's name of our parameter


def _torch(
  title: str, sign: str, fields: dict[str, Any], normalization: Normalization | None, *names: Any
) -> Layout:
  own = Names(*names)
  return Layout(title, sign, fields, normalization, own.rename, own.theirs)


_GOOGLE = dict(gelu="tanh", layer_norm_epsilon=1e-6), catalog.MINUS_ONE_TO_ONE
_EXACT = dict(gelu="exact", layer_norm_epsilon=1e-6)
_HALF, _IMAGENET = catalog.MINUS_ONE_TO_ONE, catalog.IMAGENET
_AFFINE = dict(gelu="exact", normalization="affine")

LAYOUTS = {
  "linen": Layout("Google's Mixer", r"^MixerBlock_\d+/", *_GOOGLE),
  "pre_linen": Layout("Google's Mixer before Linen", r"^Mixer/encoder", *_GOOGLE, _pre_linen),
  "timm_mixer": _torch(
    "timm's Mixer", r"^blocks\.\d+\.mlp_tokens\.", _EXACT, _HALF,
    "blocks.{}.", "MixerBlock", _TIMM | {"norm": "pre_head_layer_norm"}, _MIXER_BLOCK,
  ),
  "timm_resmlp": _torch(
    "timm's ResMLP", r"^blocks\.\d+\.linear_tokens\.", _AFFINE, _IMAGENET,
    "blocks.{}.", "ResMlpBlock", _TIMM, _RESMLP_BLOCK, AFFINE,
  ),
  "deit_resmlp": _torch(
    "deit's ResMLP", r"^blocks\.\d+\.attn\.(weight|bias)$", _AFFINE, _IMAGENET,
    "blocks.{}.", "ResMlpBlock", _DEIT, _DEIT_BLOCK, AFFINE,
  ),
  "timm_gmlp": _torch(
    "timm's gMLP", r"^blocks\.\d+\.mlp_channels\.gate\.", _EXACT | dict(gate_epsilon=1e-5), _HALF,
    "blocks.{}.", "GmlpBlock", _TIMM, _GMLP_BLOCK, NORM,
  ),
  "resnet_bottleneck": _torch(
    "PyTorch's ResNet of bottlenecks", r"^layer\d+\.\d+\.conv3\.", {}, None,
    "layer{}.{}.", "BottleneckBlock", _RESNET, _RESNET_BLOCK,
  ),
  "resnet": _torch(
    "PyTorch's ResNet", r"^layer\d+\.\d+\.conv1\.", {}, None,
    "layer{}.{}.", "BasicBlock", _RESNET, _RESNET_BLOCK,
  ),
  "regnety": _torch(
    "timm's RegNetY", r"^s\d+\.b\d+\.se\.", {}, _IMAGENET,
    "s{}.b{}.", "RegNetYBlock", _REGNET, _REGNET_BLOCK,
  ),
  # `save` writes it for the other families; notes in the file have the fields.
  "own": Layout(
    "this library's", r"^(ResMlp|Gmlp|Basic|Bottleneck|RegNetY)Block_\d+/", {}, None
  ),
}  # fmt: skip


def convert(path: str, arrays: Arrays) -> tuple[str, Arrays]:
  """The key in `LAYOUTS` of a file's layout, and its arrays with our names and axes.

  An array that the layout does not know keeps its name. A UserError, which names `path`, is raised
  if no layout has such names, or if two arrays become one.
  """
  arrays = unwrapped(path, arrays, [layout.sign for layout in LAYOUTS.values()])
  for key, layout in LAYOUTS.items():
    if any(re.search(layout.sign, name) for name in arrays):
      renamed = layout.rename(arrays)
      if len(renamed) < len(arrays):
        raise UserError(f"{path}: two arrays have the same place in {layout.title}")
      return key, renamed
  some = ", ".join(sorted(arrays)[:4])
  titles = ", ".join(layout.title for layout in LAYOUTS.values())
  raise UserError(f"{path}: its {len(arrays)} arrays ({some}, ...) are in none of: {titles}")
