"""Images and labels: where they come from and what is done to them on the device."""

from mixer_jax.data.sources import CROPS, STREAMS, Dataset, Split, load

__all__ = ["CROPS", "STREAMS", "Dataset", "Split", "load"]
