"""Public weights: read a file, learn what model it wants, fit it to that model.

  weights = pretrained.read("google/imagenet21k/Mixer-B_16")  # or a path, or an address
  model = models.build("mixer_b16", 10, **weights.model_fields(image_size=224))
  params = weights.fit(jax.eval_shape(model.init, key, images)["params"])

Files are `.npz` of google-research/vision_transformer and big_vision,
`.safetensors` and PyTorch files of timm and facebookresearch/deit, and what
`save` writes. What a file is, its contents say, not its name.
"""

from mixer_jax.pretrained.catalog import CATALOG, Entry, Normalization
from mixer_jax.pretrained.fit import RESIZES
from mixer_jax.pretrained.weights import Weights, read, save

__all__ = ["CATALOG", "Entry", "Normalization", "RESIZES", "Weights", "read", "save"]
