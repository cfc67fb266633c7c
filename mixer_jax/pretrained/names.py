"""A peer's names and axes of parameters and ours, both ways.

PyTorch has dense kernels as [out, in] and convolutions as [out, in, height, width]; ours are
[in, out] and [height, width, in, out].
"""

import logging
import re
from typing import Iterable, Mapping

import numpy as np

from mixer_jax.pretrained.containers import Arrays, listed

_LOG = logging.getLogger(__name__)

# Modules that PyTorch puts around others: data parallelism, torch.compile, FSDP, checkpointing.
_WRAPPERS = re.compile(
  r"(?<![^.])(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)

# Parameters of a layer, theirs and ours. Of equivalent names the last one is said in messages.
NORM = {"running_mean": "mean", "running_var": "var", "weight": "scale", "bias": "bias"}
AFFINE = {"alpha": "scale", "beta": "bias"}
TENSORFLOW = {"gamma": "scale", "beta": "bias", "weight": "scale", "bias": "bias"}
_EMBEDDINGS = ("words", "positions", "segment_types")


def unwrapped(source: str, arrays: Arrays, signs: Iterable[str]) -> Arrays:
  """The arrays without what training programs put around a network; what is taken off is logged.

  These are the names of PyTorch's wrappers; a prefix, such as Lightning's "model." or DINO's
  "backbone.", that stands before the first of the patterns `signs` that any name matches; and a
  projection head ("head.") beside that prefix.
  """
  cleaned = {_WRAPPERS.sub("", name): array for name, array in arrays.items()}
  taken = {part for name in arrays for part in _WRAPPERS.findall(name)}
  patterns = [re.compile(rf"((?:\w+\.)*?)(?:{sign.removeprefix('^')})") for sign in signs]
  matches = (pattern.match(name) for pattern in patterns for name in cleaned)
  prefix = next((match[1] for match in matches if match), "")
  beside = [name for name in cleaned if not name.startswith(prefix)]
  if prefix and all(name.startswith("head.") for name in beside):
    taken |= {prefix}
    cleaned = {n.removeprefix(prefix): x for n, x in cleaned.items() if n not in beside}
    if beside:
      _LOG.info("%s: left out the head beside the network: %s", source, listed(beside))
  if taken:
    _LOG.info("%s: took %s off the names in it", source, " and ".join(sorted(taken)))
  return cleaned


class Names:
  """The names of a peer's network.

  Attributes:
    place: what stands before the names inside a block, with "{}" for a number, as "blocks.{}.".
    block: our name of a block; blocks with two numbers are counted together.
    outside: modules of the whole network, theirs to ours.
    inside: modules of a block, theirs to ours.
    norm: parameters of a normalisation, theirs to ours.
  """

  def __init__(
    self,
    place: str,
    block: str,
    outside: Mapping[str, str],
    inside: Mapping[str, str],
    norm: Mapping[str, str] = NORM,
  ):
    self._place = place
    self._in_block = re.compile(re.escape(place).replace(r"\{\}", r"(\d+)"))
    modules = {**outside, **{f"#{theirs}": f"{block}_#/{ours}" for theirs, ours in inside.items()}}
    self._ours = {
      f"{module}{'.' if leaf else ''}{leaf}": f"{ours}/{own}"
      for module, ours in modules.items()
      for leaf, own in _parameters(ours, norm).items()
    }
    self._theirs = {ours: theirs for theirs, ours in self._ours.items()}

  def rename(self, arrays: Arrays) -> Arrays:
    """Arrays with our names and axes; an unknown one keeps its name, and is refused later."""
    matches = {name: match for name in arrays if (match := self._in_block.match(name))}
    places = {name: tuple(map(int, match.groups())) for name, match in matches.items()}
    counted = {place: i for i, place in enumerate(sorted(set(places.values())))}
    renamed = {}
    for name, array in arrays.items():
      place = places.get(name)
      ours = self._ours.get(f"#{name[matches[name].end() :]}" if place else name)
      if ours:
        if place:
          ours = ours.replace("#", str(place[0] if len(place) == 1 else counted[place]))
        name, array = ours, _our_axes(array, ours)
      renamed[name] = array
    return renamed

  def theirs(self, path: str) -> str:
    """Their name of our parameter, of a block or of some ("Block_{0-2}/..."); "" if unknown."""
    block = re.match(r"(\w+Block_)([^/]+)(/.+)", path)
    if block and self._place.count("{}") > 1:
      return ""
    name = self._theirs.get(f"{block[1]}#{block[3]}" if block else path, "")
    if block:
      name = name.replace("#", self._place.format(block[2]))
    return f"{name}, transposed" if name and path.endswith("/kernel") else name


def _parameters(ours: str, norm: Mapping[str, str]) -> Mapping[str, str]:
  if "layer_scale" in ours:
    return {"": "scale"}  # their module is the parameter itself
  if "norm" in ours or "LayerNorm" in ours:
    return norm
  return {"weight": "embedding" if ours in _EMBEDDINGS else "kernel", "bias": "bias"}


def _our_axes(array: np.ndarray, ours: str) -> np.ndarray:
  if ours.endswith("/kernel"):
    array = array.transpose(2, 3, 1, 0) if array.ndim == 4 else array.T
    # A convolution there, a dense layer here.
    return array[0, 0] if ours.endswith(("/squeeze/kernel", "/excite/kernel")) else array
  # timm's affine vectors are [1, 1, channels].
  return array[0, 0] if array.ndim == 3 and array.shape[:2] == (1, 1) else array
