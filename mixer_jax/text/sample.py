"""The bundled sample: labelled sentences of SST-2, and a vocabulary that was trained on them.

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
