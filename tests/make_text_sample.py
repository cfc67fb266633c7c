"""Makes the bundled sample of SST-2 and its vocabulary.

  python -m tests.make_text_sample --source=DIR --out=DIR

DIR of --source holds sst2_{train,dev,test}.tsv.xz with the columns label and sentence. The train
file of GLUE has sentences and thousands of phrases of them: the sample keeps a phrase only if no
longer one holds it. The same source and seed give the same sample.
"""

import argparse
import lzma
import pathlib

import numpy as np

from mixer_jax.errors import UserError
from mixer_jax.text import records
from mixer_jax.text.vocabulary import Vocabulary

LEAST_WORDS = 5
SPLITS = ("train", "dev", "test")


def make_text_sample(
  source: pathlib.Path, out: pathlib.Path, most: int = 8000, size: int = 4000, seed: int = 0
) -> None:
  """Writes sst2_{train,dev,test}.tsv.xz and vocab.txt.

  Args:
    source: the folder of the whole set.
    out: the folder of the sample.
    most: training sentences at most.
    size: entries of the vocabulary.
    seed: of the choice.

  Raises:
    UserError: if a file of the source is not as it has to be.
  """
  found = {split: _read(source / f"sst2_{split}.tsv.xz") for split in SPLITS}
  held_out = {sentence for split in SPLITS[1:] for sentence, _ in found[split]}
  longest = [(text, label) for text, label in _longest(found["train"]) if text not in held_out]
  chosen = np.random.default_rng(seed).permutation(len(longest))[:most]
  found["train"] = [longest[i] for i in chosen]
  out.mkdir(parents=True, exist_ok=True)
  for split, pairs in found.items():
    text = "".join(f"{label}\t{sentence}\n" for sentence, label in pairs)
    content = lzma.compress(f"label\tsentence\n{text}".encode(), preset=9 | lzma.PRESET_EXTREME)
    (out / f"sst2_{split}.tsv.xz").write_bytes(content)
  Vocabulary.train([sentence for sentence, _ in found["train"]], size).save(out / "vocab.txt")


def _read(path: pathlib.Path) -> list[tuple[str, str]]:
  table = records.rows(str(path), "sentence")
  return list(zip(table.texts, table.labels))


def _longest(pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
  """Those of at least `LEAST_WORDS` words that lie within no other."""
  inside, longest = set(), []
  for sentence, label in sorted(pairs, key=lambda pair: (-len(pair[0].split()), pair)):
    words = sentence.split()
    if len(words) >= LEAST_WORDS and hash(tuple(words)) not in inside:
      longest.append((sentence, label))
      ends = range(LEAST_WORDS, len(words) + 1)
      inside |= {hash(tuple(words[i:j])) for j in ends for i in range(j - LEAST_WORDS + 1)}
  return longest


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--source", type=pathlib.Path, required=True)
  parser.add_argument("--out", type=pathlib.Path, required=True)
  parser.add_argument("--most", type=int, default=8000)
  parser.add_argument("--size", type=int, default=4000)
  parser.add_argument("--seed", type=int, default=0)
  try:
    make_text_sample(**vars(parser.parse_args()))
  except UserError as error:
    parser.exit(2, f"{error}\n")


if __name__ == "__main__":
  main()
