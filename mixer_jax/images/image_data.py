"""The options of image data, and the contradictions between them."""

import dataclasses
from typing import Annotated

from mixer_jax.data import further, splits
from mixer_jax.data.order import Sampling
from mixer_jax.errors import UserError
from mixer_jax.options import Option, Size, one_of, pair

STREAMS = ("auto", "always", "never")
_SIDE = 2**14  # pixels; larger images would take hours or all memory
FITS = ("pad", "crop", "squash")
# Mean and standard deviation of pixels in [0, 1], as in the K-FAC study's code. Training images of
# these sets are mirrored, unless the config says otherwise.
CIFAR10 = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
STATISTICS = {
  "sample": CIFAR10,
  "cifar10": CIFAR10,
  "cifar100": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
}
_OTHERS = (0.5,) * 3, (0.5,) * 3
_FIT = "how stored_size, and prediction, change proportions: black borders, the centre alone, or distorted"
_BY_NAME = (
  "; None: that of the weights to start from, of CIFAR for its sets and the sample, else 0.5"
)
_TEST_LABELS = "JSON files of right classes of such sets, NAME=FILE with commas"


@dataclasses.dataclass(frozen=True)
class ImageData:
  """The group `config.data`.

  A set of more than 32 GiB decoded, or with `crop`, is streamed if `stream` is "auto". With
  crop="inception" areas become images of `image_size`, and test images, resized to the smallest that
  covers `resize` (for a side: its shorter side), are cropped at the centre.
  """

  name: Annotated[str, Option('"sample", "folder", "npz" or a TFDS name')] = "sample"
  dir: Annotated[str, Option("path of the folder, file, archive or TFDS's data_dir", free=True)] = (
    ""
  )
  cache_dir: Annotated[
    str, Option('folder of decoded images; "": ~/.cache/mixer_jax', free=True)
  ] = ""
  train_split: Annotated[str, Option('training set as TFDS writes it, such as "train[:90%]"')] = (
    "train"
  )
  test_split: Annotated[str, Option('test set, such as "test" or "train[90%:]"')] = "test"
  validation_split: Annotated[
    str, Option('split that picks the best checkpoint; "": the test split does')
  ] = ""
  extra_test_splits: Annotated[str, Option("further test sets, separated by commas")] = ""
  test_sets: further.option("a folder of class folders, an .npz or tfds:NAME[@SPLIT]") = ""
  test_labels: Annotated[str, Option(_TEST_LABELS, free=True)] = ""
  stored_size: Annotated[
    Size, Option("side of images as stored, or height and width; 0: unchanged", 0, _SIDE)
  ] = 0
  fit: one_of(_FIT, FITS) = "pad"
  stream: one_of("decode each batch anew, not once", STREAMS, free=True) = "auto"
  crop: one_of("train on random areas of encoded images", ("", "inception")) = ""
  smallest_crop: Annotated[float, Option("least share of such an area", 1e-6, 1)] = 0.05
  workers: Annotated[
    int, Option("decoding processes; -1: one a CPU; 0: a thread instead", -1, 1024, free=True)
  ] = -1
  read_ahead: Annotated[int, Option("images a worker decodes ahead", 1, free=True)] = 64
  image_size: Annotated[
    Size, Option("side that the model sees, in pixels, or height and width", 1, _SIDE)
  ] = 32
  resize: Annotated[
    Size, Option("side before a crop on the device, or height and width; 0: no crop", 0, _SIDE)
  ] = 0
  pad: Annotated[int, Option("padding before a random crop, without resize", 0, _SIDE)] = 4
  flip: Annotated[
    bool | None, Option("mirror training images at random; None: those of the sample and of CIFAR")
  ] = None
  random_crop: Annotated[bool, Option("with resize: crop at random, not the centre")] = False
  repeats: Annotated[int, Option("copies of each training example in a row", 1, 1024)] = 1
  sampling: Sampling = "example"
  mean: Annotated[
    tuple[float, ...] | None,
    Option(f"mean of the pixels in [0, 1], each channel{_BY_NAME}", -1e4, 1e4, length=3),
  ] = None
  std: Annotated[
    tuple[float, ...] | None,
    Option(f"standard deviation of these pixels, each channel{_BY_NAME}", 1e-4, 1e4, length=3),
  ] = None

  def __post_init__(self):
    mean, std = STATISTICS.get(self.name, _OTHERS)
    for field, value in dict(mean=mean, std=std, flip=self.name in STATISTICS).items():
      if getattr(self, field) is None:
        object.__setattr__(self, field, value)

  @property
  def split_specs(self) -> dict[str, str]:
    """The split strings by the name of the split."""
    named = self.train_split, self.test_split, self.validation_split, self.extra_test_splits
    return splits.by_name(*named)

  @property
  def further_sets(self) -> dict[str, tuple[str, str]]:
    """Place and file of labels, maybe "", of the test sets of other sources, by name."""
    labels = further.pairs(self.test_labels, "data.test_labels")
    places = further.places(self.test_sets, {*splits.OWN} | self.split_specs.keys())
    if unknown := labels.keys() - places.keys():
      raise UserError(f"data.test_labels has {min(unknown)!r}, which is not in data.test_sets")
    return {name: (place, labels.get(name, "")) for name, place in places.items()}

  def check(self) -> None:
    """Raises a UserError for options that contradict each other."""
    side, resize, crop, stored = self.image_size, self.resize, self.crop, self.stored_size
    if self.dir and self.name == "sample":
      allowed = "folder, npz, cifar10, cifar100 or a TFDS name"
      raise UserError(f"data.dir is {self.dir!r}, but data.name is 'sample'; allowed: {allowed}")
    if crop and self.stream == "never":
      raise UserError(f"data.crop={crop}: needs the encoded images, but data.stream is never")
    if crop and (stored or self.random_crop):
      unused = "data.stored_size and data.random_crop are not used"
      raise UserError(f"data.crop={crop}: {unused} with it; leave them out")
    smaller = any(n < own for n, own in zip(pair(resize), pair(side)))
    if (resize and smaller) or (crop and not resize):
      least = f"{'' if crop else '0, or '}at least data.image_size, {side}"
      raise UserError(f"data.resize is {resize}; allowed: {least}")
    if not resize and self.pad >= min(pair(side)):
      why = f"it must be less than data.image_size, {side}, or a crop may show none of the image"
      raise UserError(f"data.pad is {self.pad}; {why}")
    if self.random_crop and not resize:
      raise UserError(
        "data.random_crop is True, but data.resize, the side of the images that it crops, is 0"
      )
    splits.check(self.split_specs, self.extra_test_splits)
    _ = self.further_sets
    if self.name == "npz":
      self.check_arrays("an .npz file")

  def check_arrays(self, source: str) -> None:
    """Raises a UserError for options of encoded images, if a source is of arrays."""
    for name, other in (("stored_size", 0), ("crop", "''"), ("stream", "auto")):
      if (value := getattr(self, name)) not in (0, "", "auto", "never"):
        why = f"images of {source} are decoded already; set it to {other}"
        raise UserError(f"data.{name}={value}: {why}")
