"""Makes the bundled CIFAR-10 sample: a class-balanced part of an image folder.

  python -m tests.make_sample --source=DIR --out=DIR

DIR of --source holds {train,test}/CLASS/NAME.jpg, images of 32x32. The JPEG
bytes are copied as they are. The result, OUT/cifar10_sample/1.0.0, is a prepared
TFDS directory (array_record) in an order shuffled by file name. The same source
and seed give the same sample. Needs no TensorFlow.
"""

import argparse
import io
import pathlib

import numpy as np
import tensorflow_datasets as tfds

from mixer_jax.errors import UserError

NAME = "cifar10_sample"
_IMAGE_SHAPE = (32, 32, 3)
_DESCRIPTION = """\
A class-balanced sample of CIFAR-10: real images of the JPEG edition, chosen by
tests/make_sample.py with {train_per_class} training and {test_per_class} test images a class, seed {seed}.

Origin: the 60,000 PNG files of github.com/cyizhuo/CIFAR-10-dataset at commit
a828d74fc38cd82a82ecfdeca6522873baf96efa, re-encoded as JPEG (quality 90, 4:4:4). That repository states
no licence. CIFAR-10 was collected by Alex Krizhevsky, Vinod Nair and Geoffrey
Hinton; its authors ask to cite the report below. Figures that come from this
sample are not comparable to figures on the full, lossless CIFAR-10."""
_CITATION = """\
@TECHREPORT{Krizhevsky09learningmultiple,
  author = {Alex Krizhevsky},
  title = {Learning multiple layers of features from tiny images},
  institution = {University of Toronto},
  year = {2009}
}"""


def make_sample(
  source: pathlib.Path,
  out: pathlib.Path,
  train_per_class: int = 500,
  test_per_class: int = 100,
  seed: int = 0,
) -> pathlib.Path:
  """Writes the sample.

  Args:
    source: folder {train,test}/CLASS/NAME.jpg.
    out: directory in which NAME/1.0.0 is made.
    train_per_class: images of each class in the train split.
    test_per_class: likewise in the test split.
    seed: of the choice.

  Returns:
    The directory that was made.

  Raises:
    UserError: if the source has too few images, or the sample exists.
  """
  result = out / NAME / "1.0.0"
  if result.exists():
    raise UserError(f"--out={out}: {result} exists; remove it first")
  chosen = {
    "train": _choose(source / "train", train_per_class, seed),
    "test": _choose(source / "test", test_per_class, seed),
  }
  class_names = sorted({path.parent.name for path in chosen["train"]})
  description = _DESCRIPTION.format(
    train_per_class=train_per_class, test_per_class=test_per_class, seed=seed
  )
  tfds.disable_progress_bar()
  _define_builder(chosen, class_names, description)(
    data_dir=str(out), file_format="array_record"
  ).download_and_prepare()
  for empty in (out / "downloads" / "extracted", out / "downloads"):  # TFDS leaves them.
    if empty.is_dir() and not any(empty.iterdir()):
      empty.rmdir()
  return result


def _choose(split_dir: pathlib.Path, per_class: int, seed: int) -> list[pathlib.Path]:
  """Returns `per_class` images of each class, independent of the other classes."""
  if not split_dir.is_dir():
    raise UserError(
      f"--source: {split_dir}: no such folder; needed are {{train,test}}/CLASS/NAME.jpg"
    )
  chosen = []
  for class_dir in sorted(p for p in split_dir.iterdir() if p.is_dir()):
    paths = sorted(class_dir.glob("*.jpg"))
    if len(paths) < per_class:
      raise UserError(
        f"--source: {class_dir} has {len(paths)} images (.jpg), fewer than the {per_class} wanted"
      )
    rows = np.random.default_rng(seed).permutation(len(paths))[:per_class]
    chosen += [paths[i] for i in sorted(rows)]
  return chosen


def _define_builder(
  chosen: dict[str, list[pathlib.Path]],
  class_names: list[str],
  description: str,
) -> type[tfds.core.GeneratorBasedBuilder]:
  """Returns a TFDS builder class for the chosen images, by split."""

  class Cifar10Sample(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """The sample; its examples are shuffled by their keys' hashes."""

    __module__ = "mixer_jax.data.make_sample"  # not __main__: it is recorded
    name = NAME
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
      return tfds.core.DatasetInfo(
        builder=self,
        description=description,
        citation=_CITATION,
        homepage="https://www.cs.toronto.edu/~kriz/cifar.html",
        features=tfds.features.FeaturesDict(
          {
            "image": tfds.features.Image(shape=_IMAGE_SHAPE, encoding_format="jpeg"),
            "label": tfds.features.ClassLabel(names=class_names),
          }
        ),
      )

    def _split_generators(self, dl_manager):
      return {split: self._generate_examples(paths) for split, paths in chosen.items()}

    def _generate_examples(self, paths):
      for path in paths:
        label = path.parent.name
        yield f"{label}/{path.name}", {"image": io.BytesIO(path.read_bytes()), "label": label}

  return Cifar10Sample


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--source", type=pathlib.Path, required=True)
  parser.add_argument("--out", type=pathlib.Path, required=True)
  parser.add_argument("--train_per_class", type=int, default=500)
  parser.add_argument("--test_per_class", type=int, default=100)
  parser.add_argument("--seed", type=int, default=0)
  args = vars(parser.parse_args())
  try:
    print(make_sample(**args))
  except UserError as error:
    parser.exit(2, f"{error}\n")


if __name__ == "__main__":
  main()
