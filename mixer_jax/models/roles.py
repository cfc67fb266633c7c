"""Facts about a parameter by its path, from all families."""

from mixer_jax.models import (
  fno,
  galerkin,
  gmlp,
  mixer,
  mlp_operators,
  resmlp,
  resnet,
  text,
  transformer,
  translation,
)
from mixer_jax.models.family import COMMON, role

FAMILIES = (mixer.FAMILY, resmlp.FAMILY, gmlp.FAMILY, resnet.FAMILY)
TEXT_FAMILIES = (text.FAMILY, transformer.FAMILY)
OPERATOR_FAMILIES = (galerkin.FAMILY, fno.FAMILY, mlp_operators.FAMILY)

_ALL = (*FAMILIES, *TEXT_FAMILIES, *OPERATOR_FAMILIES, translation.FAMILY)
_LAYERS = COMMON | {path: layer for family in _ALL for path, layer in family.layers.items()}
_DECAYED = tuple({f"/{end}" for family in _ALL for end in family.decayed})


def layer_kind(path: str) -> str:
  """The kind of layer, one of `LAYER_KINDS`, of a parameter as "MixerBlock_0/LayerNorm_0/scale"."""
  layer = role(_LAYERS, path)
  return layer.kind if layer else "channel_mixing"


def token_axes(path: str) -> tuple[str, ...]:
  """The meaning of each axis of an unrolled parameter over tokens: "in", "out", "hidden"; or ()."""
  layer, leaf = role(_LAYERS, path), path.rpartition("/")[2]
  if not layer or "Block_" not in path:
    return ()
  return {"kernel": layer.token_axes, "bias": layer.token_axes[1:]}.get(leaf, ())


def reads_tokens(path: str) -> bool:
  """Whether a parameter is the first matrix over tokens of its block, [tokens, units]."""
  layer = role(_LAYERS, path)
  return bool(layer) and path.endswith("/kernel") and layer.token_axes[:1] == ("in",)


def is_decayed(path: str) -> bool:
  """Whether weight decay of "kernels" acts on a parameter: not on biases, norms and scales.

  It acts on embeddings of text, as BERT's does.
  """
  return f"/{path}".endswith(_DECAYED)
