"""Pictures of a translator: its matrices over tokens, and its cross-attention to a sentence."""

from typing import Any, Callable, Mapping, Sequence

from flax import traverse_util
import jax
import numpy as np

from mixer_jax import models
from mixer_jax.tasks.text import pictures

_PARTS = ("query", "key")
_SIDES = {"encoder": "EncoderBlock", "decoder": "DecoderBlock"}


def attention_maps(apply: Callable[..., Any], num_heads: int, *args: Any) -> dict[str, np.ndarray]:
  """Cross-attention [targets, sources], the mean of all heads, by the block's name.

  `apply` is called with `args`, one sentence without padding, and Flax's keywords.
  """
  crosses = lambda module: getattr(module.parent, "name", "") == "cross_attention"
  kept = lambda module, _: module.name in _PARTS and crosses(module)
  capture = dict(capture_intermediates=kept, mutable=["intermediates"])
  _, state = jax.jit(lambda *args: apply(*args, **capture))(*args)
  sown = traverse_util.flatten_dict(dict(state["intermediates"]), sep="/")
  heads = lambda x: np.asarray(x, np.float32).reshape(len(x), num_heads, -1)
  found = {}
  for path in models.by_numbers(sown):
    block, _, rest = path.partition("/")
    if rest == "cross_attention/query/__call__":
      query, key = (heads(sown[f"{block}/cross_attention/{k}/__call__"][0][0]) for k in _PARTS)
      scores = np.einsum("thc,shc->hts", query, key) / query.shape[-1] ** 0.5
      found[block] = np.asarray(jax.nn.softmax(scores)).mean(0)
  return found


def drawn(
  params: Any, maps: Mapping[str, np.ndarray], sources: Sequence[str], targets: Sequence[str]
) -> dict[str, Any]:
  """Figures by name: the matrices over tokens of each side, and `attention_maps` of a sentence."""
  figures, found = {}, pictures.matrices(params)
  for side, block in _SIDES.items():
    own = {name: matrix for name, matrix in found.items() if name.startswith(block)}
    if own:  # the decoder's are used below their diagonal alone
      figures[side] = pictures.images(
        {k: np.tril(x) if side == "decoder" else x for k, x in own.items()}
      )
  figures["cross_attention"] = pictures.attention(maps, targets, sources)
  return figures
