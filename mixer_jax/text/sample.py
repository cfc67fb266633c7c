"""The bundled samples, each with a vocabulary that was trained on it.

Labelled sentences of SST-2, and sentences of a toy grammar in English and German.
`bundled/README.md` states their origin.
"""

import pathlib

DIRECTORY = pathlib.Path(__file__).parent / "bundled"
# Splits, tables with the columns `sentence` and `label`.
SPLITS = {split: DIRECTORY / f"sst2_{split}.tsv.xz" for split in ("train", "dev", "test")}
TEXT, LABEL = "sentence", "label"
# Names of the labels "0" and "1".
CLASS_NAMES = ("negative", "positive")
VOCABULARY = DIRECTORY / "vocab.txt"

# Likewise, tables with the columns `en` and `de`.
PAIRS = {split: DIRECTORY / f"pairs_{split}.tsv.xz" for split in ("train", "dev", "test")}
PAIRS_VOCABULARY = DIRECTORY / "pairs_bpe.json"
