"""The public files that `read` knows by name: Mixer, ResMLP, gMLP, and convolutional teachers.

Addresses and settings come from google-research/vision_transformer (the list
of its bucket in vit_jax.ipynb, the input pipeline), facebookresearch/deit
(resmlp_models.py, README_resmlp.md) and timm 1.0.31 (models/mlp_mixer.py, regnet.py, resnet.py).
"""

import re
from typing import Any, Mapping, NamedTuple


class Normalization(NamedTuple):
  """Mean and standard deviation of the channels, for pixels scaled to [0, 1].

  Attributes:
    mean: mean of red, green and blue.
    std: standard deviation of red, green and blue.
  """

  mean: tuple[float, float, float]
  std: tuple[float, float, float]


# Pixels to [-1, 1], as in Google's input pipelines.
MINUS_ONE_TO_ONE = _HALF = Normalization((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
IMAGENET = Normalization((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
# Pixels to [0, 1], as in "ImageNet-21K Pretraining for the Masses" (miil).
ZERO_TO_ONE = _ZERO = Normalization((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


class Entry(NamedTuple):
  """A public file; its weights were trained on images of 224x224 pixels.

  Attributes:
    name: name for `read`: the publisher and the publisher's own name.
    model: name in `models.VARIANTS`.
    num_classes: width of the head.
    normalization: normalization of the pixels it was trained on.
    urls: addresses, maybe of several formats; the first is taken.
    second_source: name of another publisher's file with the same weights; "": none.
    overrides: fields in which the model differs from the named one.
  """

  name: str
  model: str
  num_classes: int
  normalization: Normalization
  urls: tuple[str, ...]
  second_source: str = ""
  overrides: Mapping[str, Any] = {}


_HUB = "https://huggingface.co/timm/{}/resolve/main/model.safetensors"
_RELEASE = "https://github.com/rwightman/pytorch-image-models/releases/download/{}.pth"
_DEIT = "https://dl.fbaipublicfiles.com/deit/{}.pth"
_PYTORCH = "https://download.pytorch.org/models/{}.pth"

# Google: path in gs://mixer_models, model, classes, the same weights elsewhere.
_GOOGLE = (
  ("imagenet1k/Mixer-B_16", "mixer_b16", 1000, "timm/mixer_b16_224.goog_in21k_ft_in1k"),
  ("imagenet1k/Mixer-L_16", "mixer_l16", 1000, "timm/mixer_l16_224.goog_in21k_ft_in1k"),
  ("imagenet21k/Mixer-B_16", "mixer_b16", 21843, "timm/mixer_b16_224.goog_in21k"),
  ("imagenet21k/Mixer-L_16", "mixer_l16", 21843, "timm/mixer_l16_224.goog_in21k"),
  ("sam/Mixer-B_16", "mixer_b16", 1000, ""),
  ("sam/Mixer-B_32", "mixer_b32", 1000, ""),
  ("gsam/Mixer-B_16", "mixer_b16", 1000, ""),
  ("gsam/Mixer-B_32", "mixer_b32", 1000, ""),
  ("gsam/Mixer-S_16", "mixer_s16", 1000, ""),
  ("gsam/Mixer-S_32", "mixer_s32", 1000, ""),
  ("gsam/Mixer-S_8", "mixer_s16", 1000, ""),
)
_MIIL = 11221  # of the ImageNet-21K that miil cleaned, and of no other public file
# timm: name (it begins with the model's), classes, normalization, the older file on GitHub.
_TIMM = (
  ("mixer_b16_224.goog_in21k_ft_in1k", 1000, _HALF, "v0.1-vitjx/jx_mixer_b16_224-76587d61"),
  ("mixer_b16_224.goog_in21k", 21843, _HALF, "v0.1-vitjx/jx_mixer_b16_224_in21k-617b3de2"),
  ("mixer_l16_224.goog_in21k_ft_in1k", 1000, _HALF, "v0.1-vitjx/jx_mixer_l16_224-92f9adc4"),
  ("mixer_l16_224.goog_in21k", 21843, _HALF, "v0.1-vitjx/jx_mixer_l16_224_in21k-846aa33c"),
  ("mixer_b16_224.miil_in21k_ft_in1k", 1000, _ZERO, "v0.1-tresnet/mixer_b16_224_miil-9229a591"),
  ("mixer_b16_224.miil_in21k", _MIIL, _ZERO, "v0.1-tresnet/mixer_b16_224_miil_in21k-2a558a71"),
  ("gmlp_s16_224.ra3_in1k", 1000, _HALF, "v0.1-weights/gmlp_s16_224_raa-10536d42"),
)
# ResMLP: file of deit, name in timm, model.
_RESMLP = (
  ("resmlp_12_no_dist", "resmlp_12_224.fb_in1k", "resmlp_s12"),
  ("resmlp_24_no_dist", "resmlp_24_224.fb_in1k", "resmlp_s24"),
  ("resmlp_36_no_dist", "resmlp_36_224.fb_in1k", "resmlp_s36"),
  ("resmlpB_24_no_dist", "resmlp_big_24_224.fb_in1k", "resmlp_b24_8"),
  ("resmlp_12_dist", "resmlp_12_224.fb_distilled_in1k", "resmlp_s12"),
  ("resmlp_24_dist", "resmlp_24_224.fb_distilled_in1k", "resmlp_s24"),
  ("resmlp_36_dist", "resmlp_36_224.fb_distilled_in1k", "resmlp_s36"),
  ("resmlpB_24_dist", "resmlp_big_24_224.fb_distilled_in1k", "resmlp_b24_8"),
  ("resmlpB_24_22k", "resmlp_big_24_224.fb_in22k_ft_in1k", "resmlp_b24_8"),
  ("resmlp_12_dino", "resmlp_12_224.fb_dino", "resmlp_s12"),
  ("resmlp_24_dino", "resmlp_24_224.fb_dino", "resmlp_s24"),
)

# Convolutional networks: name in timm, model, address of the same weights at their publisher.
_CONVNETS = (
  ("regnety_160.deit_in1k", "regnety_160", _DEIT.format("regnety_160-a5fe301d")),
  ("resnet18.tv_in1k", "resnet_18", _PYTORCH.format("resnet18-f37072fd")),
  ("resnet50.tv_in1k", "resnet_50", _PYTORCH.format("resnet50-0676ba61")),
)


def _entries():
  for path, model, classes, second in _GOOGLE:
    overrides = dict(patch_size=8) if path.endswith("S_8") else {}
    urls = (f"gs://mixer_models/{path}.npz",)
    yield Entry(f"google/{path}", model, classes, _HALF, urls, second, overrides)
  google = {second: f"google/{path}" for path, _, _, second in _GOOGLE}
  for file, classes, normalization, release in _TIMM:
    name, urls = f"timm/{file}", (_HUB.format(file), _RELEASE.format(release))
    model = file.partition("_224")[0]
    yield Entry(name, model, classes, normalization, urls, google.get(name, ""))
  for file, timm_file, model in _RESMLP:
    deit, timm = f"deit/{file}", f"timm/{timm_file}"
    yield Entry(deit, model, 1000, IMAGENET, (_DEIT.format(file),), timm)
    yield Entry(timm, model, 1000, IMAGENET, (_HUB.format(timm_file),), deit)
  for file, model, publisher in _CONVNETS:
    yield Entry(f"timm/{file}", model, 1000, IMAGENET, (_HUB.format(file), publisher))


CATALOG = {entry.name: entry for entry in _entries()}
"""The public files by name, an `Entry` each."""


def find(source: str) -> Entry | None:
  """The entry of this name or address; None if it is neither."""
  source = source.replace("https://storage.googleapis.com/", "gs://", 1)
  return next((e for e in CATALOG.values() if source in (e.name, *e.urls)), None)


def is_miil(path: str, num_classes: int) -> bool:
  """Whether a local file of a timm Mixer is one of miil's, judging by its classes or its path."""
  return num_classes == _MIIL or bool(re.search(r"mixer_b16_224[._]miil", path))


def published_sha256(url: str) -> str:
  """First digits of a file's SHA-256 in its name, as PyTorch's hub puts them; else ""."""
  match = re.search(r"-([0-9a-f]{8,})\.pth$", url)
  return match[1] if match else ""


def find_by_sha256(sha256: str) -> Entry | None:
  """The entry whose published checksum is that of a file; None if there is none."""
  digits = {published_sha256(url): entry for entry in CATALOG.values() for url in entry.urls}
  return next((entry for d, entry in digits.items() if d and sha256.startswith(d)), None)
