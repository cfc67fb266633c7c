"""Names and axes of PyTorch's convolutional networks to ours.

Blocks of all stages are counted together here. Averages of batch normalisation stand beside its
parameters, see `weights.beside`.
"""

import re
from typing import Mapping

from mixer_jax.pretrained.containers import Arrays

# Modules, theirs and ours: of the whole network, and of a block.
_RESNET = {"conv1": "stem", "bn1": "stem_norm", "fc": "head"}
_RESNET_BLOCK = {"downsample.0": "shortcut", "downsample.1": "shortcut_norm"}
_RESNET_BLOCK |= {f"conv{i}": f"conv{i}" for i in "123"} | {f"bn{i}": f"norm{i}" for i in "123"}
_REGNET = {"stem.conv": "stem", "stem.bn": "stem_norm", "head.fc": "head"}
_REGNET_BLOCK = {"downsample.conv": "shortcut", "downsample.bn": "shortcut_norm"}
_REGNET_BLOCK |= {"se.fc1": "squeeze", "se.fc2": "excite"}
_REGNET_BLOCK |= {f"conv{i}.conv": f"conv{i}" for i in "123"}
_REGNET_BLOCK |= {f"conv{i}.bn": f"norm{i}" for i in "123"}
_NORM = {"weight": "scale", "bias": "bias", "running_mean": "mean", "running_var": "var"}
_OTHER = {"weight": "kernel", "bias": "bias"}


def resnet(arrays: Arrays) -> Arrays:
  """Those of torchvision and timm, "layer1.0.conv1.weight"."""
  bottleneck = any(re.match(r"layer\d+\.\d+\.conv3\.", name) for name in arrays)
  block = "BottleneckBlock" if bottleneck else "BasicBlock"
  return _renamed(arrays, r"layer(\d+)\.(\d+)\.", block, _RESNET, _RESNET_BLOCK)


def regnety(arrays: Arrays) -> Arrays:
  """Those of timm and deit, "s1.b1.conv1.conv.weight"."""
  return _renamed(arrays, r"s(\d+)\.b(\d+)\.", "RegNetYBlock", _REGNET, _REGNET_BLOCK)


def _renamed(
  arrays: Arrays, place: str, block: str, whole: Mapping[str, str], inside: Mapping[str, str]
) -> Arrays:
  """Arrays with our names and axes; an unknown one keeps its name, and is refused later.

  `place` matches the stage of a block and its number there, in front of a name.
  """
  matches = {name: found for name in arrays if (found := re.match(place, name))}
  places = {name: tuple(map(int, match.groups())) for name, match in matches.items()}
  numbers = {own: i for i, own in enumerate(sorted(set(places.values())))}
  renamed = {}
  for name, array in arrays.items():
    inner = name in matches
    module, _, leaf = name[matches[name].end() if inner else 0 :].rpartition(".")
    ours = (inside if inner else whole).get(module, "")
    leaf = (_NORM if "norm" in ours else _OTHER).get(leaf)
    if not (ours and leaf):
      renamed[name] = array
      continue
    if leaf == "kernel":
      array = array.transpose(2, 3, 1, 0) if array.ndim == 4 else array.T
      if ours in ("squeeze", "excite") and array.shape[:2] == (1, 1):
        array = array[0, 0]  # a convolution there, a dense layer here
    ours = f"{block}_{numbers[places[name]]}/{ours}" if inner else ours
    renamed[f"{ours}/{leaf}"] = array
  return renamed
