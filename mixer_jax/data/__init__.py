"""Images and labels: where they come from and what is done to them on the device."""

from mixer_jax.data.sources import Dataset
from mixer_jax.data.sources import load
from mixer_jax.data.sources import Split

__all__ = ["Dataset", "Split", "load"]
