"""Public weights: read a file, build the model that it fits, fit its parameters.

  file = "google/imagenet21k/Mixer-B_16"  # or a path, or an address
  model, params, normalization = pretrained.load(file, "mixer_b16", num_classes=10)

The model has the GELU and the epsilons of the weights' code. `read` gives only the file's weights.

Files are `.npz` of google-research/vision_transformer and big_vision,
`.safetensors` and PyTorch files of timm, facebookresearch/deit and torchvision, and files that
`save` wrote. Convolutional networks have statistics beside their parameters: `read` gives both. The
contents of a file tell its kind, not its name. `load_bert` reads the encoder of a BERT of Hugging
Face.
"""

from mixer_jax.pretrained.bert import LoadedBert, load_bert
from mixer_jax.pretrained.catalog import CATALOG, Entry, Normalization
from mixer_jax.pretrained.fit import RESIZES
from mixer_jax.pretrained.weights import UNSEEN, Loaded, Weights, beside, load, read, save

__all__ = (
  "CATALOG",
  "RESIZES",
  "Entry",
  "Loaded",
  "LoadedBert",
  "Normalization",
  "Weights",
  "beside",
  "load",
  "load_bert",
  "read",
  "save",
)
