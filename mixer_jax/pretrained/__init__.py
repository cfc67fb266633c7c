"""Public weights: read a file, build the model that it fits, fit its parameters.

  weights = pretrained.read("google/imagenet21k/Mixer-B_16")  # or a path, or an address
  model = models.build("mixer_b16", 10, **weights.model_fields(image_size=224))
  params = weights.fit(jax.eval_shape(model.init, key, images)["params"])

Files are `.npz` of google-research/vision_transformer and big_vision,
`.safetensors` and PyTorch files of timm and facebookresearch/deit, and files that
`save` wrote. The contents of a file tell its kind, not its name.
"""

from mixer_jax.pretrained.catalog import CATALOG, Entry, Normalization
from mixer_jax.pretrained.fit import RESIZES
from mixer_jax.pretrained.weights import Weights, read, save
