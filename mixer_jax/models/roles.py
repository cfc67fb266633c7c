"""Facts about a parameter by its path, from all families."""

import re
from typing import Iterable, Mapping

import numpy as np

from mixer_jax.models import (
  blocks,
  fno,
  galerkin,
  gmlp,
  mixer,
  mlp_operators,
  regnet,
  resmlp,
  resnet,
  text,
  transformer,
  translation,
)
from mixer_jax.models.family import STEM, Layer

FAMILIES = (mixer.FAMILY, resmlp.FAMILY, gmlp.FAMILY, resnet.FAMILY, regnet.FAMILY)
TEXT_FAMILIES = (text.FAMILY, transformer.FAMILY)
OPERATOR_FAMILIES = (galerkin.FAMILY, fno.FAMILY, mlp_operators.FAMILY)

_ALL = (*FAMILIES, *TEXT_FAMILIES, *OPERATOR_FAMILIES, translation.FAMILY)
_LAYERS = {"stem": STEM} | {path: layer for f in _ALL for path, layer in f.layers.items()}
_NORM = re.compile(r"(^|/)([a-z_]*norm\d?|LayerNorm_\d+|layer_scale(_\d)?)/")
_DECAYED = re.compile(r"(^|/)(kernel|diagonals|(\w*words|positions|segment_types)/embedding)$")


def _role(path: str) -> Layer:
  """The role of the layer of a parameter, as "MixerBlock_0/LayerNorm_0/scale".

  Scanned blocks are "MixerBlocks". A model inside another module stands below "encoder", if it is
  of text, or "backbone", if it is of images.
  """
  path = re.sub(r"^(encoder|backbone)/", "", path)
  path = re.sub(r"^(\w+Block)(s|_\d+)/", r"\1/", path)
  if _NORM.search(path):
    return Layer("norms")
  if path.startswith("head/"):
    return Layer("head")
  while "/" in path:
    path = path.rpartition("/")[0]
    if path in _LAYERS:
      return _LAYERS[path]
  return Layer("channel_mixing")


def layer_kind(path: str) -> str:
  """The kind of layer, one of `LAYER_KINDS`, of a parameter as "MixerBlock_0/LayerNorm_0/scale"."""
  return _role(path).kind


def token_axes(path: str) -> tuple[str, ...]:
  """The meaning of each axis of an unrolled parameter over tokens: "in", "out", "hidden"; or ()."""
  axes, leaf = _role(path).token_axes, path.rpartition("/")[2]
  return {"kernel": axes, "bias": axes[1:]}.get(leaf, ()) if "Block_" in path else ()


def reads_tokens(path: str) -> bool:
  """Whether a parameter is the first matrix over tokens of its block, [tokens, units]."""
  return path.endswith("/kernel") and _role(path).token_axes[:1] == ("in",)


def is_decayed(path: str) -> bool:
  """Whether weight decay of "kernels" acts on a parameter: not on biases, norms and scales.

  It acts on embeddings of text, as BERT's does, but on no class token.
  """
  return bool(_DECAYED.search(path))


_BLOCK = re.compile(rf"(.*?)({'|'.join(blocks.SCANNABLE)})(?:s|_(\d+))/")


def by_numbers(paths: Iterable[str]) -> list[str]:
  """Paths in the order of the layers: MixerBlock_9 before MixerBlock_10."""
  parts = lambda path: [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", path)]
  return sorted(paths, key=parts)


def depths(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
  """The number of layers between each parameter and the loss, by path, as BEiT counts them.

  Bao et al., 2022, https://arxiv.org/abs/2106.08254: 0 for the head and the norm before it, also
  for the layers of class-MLP pooling; 1 for the last block, 2 for the one before; for the stem one
  more than for the first block. Arrays of scanned blocks have a depth for each, [blocks, 1, ...].
  A ValueError is raised if there are no blocks, or those of several stacks.

  Args:
    shapes: of all parameters of a model, by path; it may stand below "backbone" or "encoder".
  """
  found = {path: match for path in shapes if (match := _BLOCK.match(path))}
  if len(stacks := {match[1] + match[2] for match in found.values()}) != 1:
    names = ", ".join(sorted(stacks)) or "none"
    raise ValueError(f"its layers have no single order (stacks of blocks: {names})")
  number = lambda path, match: int(match[3]) + 1 if match[3] else shapes[path][0]
  count = max(number(path, match) for path, match in found.items())
  return {path: _depth(path, found.get(path), len(shape), count) for path, shape in shapes.items()}


def _depth(path: str, block: re.Match | None, axes: int, count: int) -> np.ndarray:
  if not block:
    before = layer_kind(path) == "stem" or "embeddings_norm/" in path
    return np.array((count + 1) * (before and "class_token/" not in path))
  if block[3]:
    return np.array(count - int(block[3]))
  return np.arange(count, 0, -1).reshape(-1, *[1] * (axes - 1))
