"""Inference on pairs of sentences: MNLI, matched and mismatched, or any table of pairs.

  python -m mixer_jax.main --config=configs/mnli.py[:MODEL[,OPTIMIZER]] --config.data.vocabulary=vocab.txt
      [--config.data.name=files --config.data.dir=DIR --config.data.train_split=train.tsv \
       --config.data.test_split=test.tsv --config.data.extra_test_splits="" \
       --config.data.text=sentence_A --config.data.pair=sentence_B --config.data.label=judgment]
      [--config.pretrained=RUN_OR_BERT.safetensors]
      [--config.frozen_from=RUN_OR_BERT.safetensors]
"""

import pathlib

from mixer_jax import study

_HERE = pathlib.Path(__file__).parent


def get_config(choice="gmlp_text_small,adamw"):
  config = study.read_config(_HERE / "sst2.py", choice)
  config.data.update(
    name="glue/mnli",
    text="premise",
    pair="hypothesis",
    train_split="train",
    validation_split="",
    test_split="validation_matched",
    extra_test_splits="validation_mismatched",
    max_length=128,
  )
  return config
