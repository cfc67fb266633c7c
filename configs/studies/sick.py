"""Inference on pairs of sentences, in small: SICK in the place of MNLI's training set.

  python -m mixer_jax.study --study=configs/studies/sick.py --workdir=DIR --set=data.dir=TSV \
      --set=data.vocabulary=VOCABULARY

TSV holds sick_train.tsv, sick_dev.tsv, sick_test.tsv, and parts of MNLI's dev sets as
mnli_matched.tsv and mnli_mismatched.tsv, each with the columns premise, hypothesis and label
(entailment, neutral or contradiction). The language model and VOCABULARY are those of `sst2.py`.
Kurtsev's Tables 8 and 9 have on all of MNLI, matched: from scratch 65.1; on frozen BERT embeddings
gMLP 74.6 to 75.2, tMLP 75.5, aMLP 77.1.
"""

import pathlib

from mixer_jax import study

_HERE = pathlib.Path(__file__).parent
_LANGUAGE_MODEL = "runs/gates/split-seed0"
_SETTINGS = ("gmlp_scratch", "tmlp_scratch", "amlp_scratch", "gmlp_pretrained", "amlp_frozen")


def config(setting):
  model, _, start = setting.partition("_")
  config = study.read_config(_HERE.parent / "mnli.py", f"{model}_text_small,adamw")
  config.num_epochs = 10
  config.schedule.warmup_epochs = 1.0
  config.data.update(name="files", train_split="sick_train.tsv", validation_split="sick_dev.tsv")
  config.data.update(test_split="sick_test.tsv", max_length=64)
  config.data.extra_test_splits = "mnli_matched.tsv,mnli_mismatched.tsv"
  if start == "pretrained":
    config.pretrained = _LANGUAGE_MODEL
  if start == "frozen":
    config.frozen_from = _LANGUAGE_MODEL
    config.model.num_blocks = 2
  return config


def get_study():
  return study.Study(
    title="Inference on pairs: SICK, tested on MNLI, too",
    config=config,
    axes={"setting": _SETTINGS},
    lines=("setting",),
    notes=["AdamW at 1e-3, ten epochs of 4,500 pairs; accuracy on SICK's test set."],
  )


def get_config(run):
  return get_study().run_config(run)
