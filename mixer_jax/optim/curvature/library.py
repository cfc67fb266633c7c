"""kfac-jax on demand: everything but curvature runs without it."""

from importlib import metadata
from typing import Any

import jax

from mixer_jax.runtime.imports import without


def blocks() -> Any:
  """The module `kfac_jax_blocks`; an ImportError that names versions if kfac-jax does not work."""
  try:
    with without("tensorflow", "torch"):  # distrax, which kfac-jax imports, would import them
      from mixer_jax.optim.curvature import kfac_jax_blocks
  except Exception as e:  # it uses parts of JAX that are not public
    raise ImportError(
      f"K-FAC needs a kfac-jax that works with JAX {jax.__version__} ({_version()} is"
      f" installed; 0.0.8 works with jax >= 0.8.3, < 0.13): {e}"
    ) from e
  return kfac_jax_blocks


def _version() -> str:
  try:
    return f"kfac-jax {metadata.version('kfac-jax')}"
  except metadata.PackageNotFoundError:
    return "no kfac-jax"
