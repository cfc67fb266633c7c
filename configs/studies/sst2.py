"""SST-2 from scratch, from a language model, and on frozen encoders, in small.

  python -m mixer_jax.study --study=configs/studies/sst2.py --workdir=DIR --set=data.dir=TSV \
      --set=data.vocabulary=VOCABULARY

TSV holds SST-2 of GLUE as sst2_train.tsv, sst2_dev.tsv and sst2_test.tsv (the last with labels).
The language model is runs/gates/split-seed0, of `configs/studies/gates.py` with --workdir=runs/gates
(or another, as in --set=gmlp_pretrained:pretrained=RUN); VOCABULARY is that model's. Kurtsev ("Fully-
connected neural networks for computer vision and natural language processing tasks", Tables 8 and
9) has for 18 blocks of 512 channels: from scratch 80.4; on frozen BERT embeddings gMLP 88.1 to
88.6, tMLP 89.8, aMLP 90.7.
"""

import pathlib

from mixer_jax import study

_HERE = pathlib.Path(__file__).parent
_LANGUAGE_MODEL = "runs/gates/split-seed0"
_SETTINGS = (
  *("gmlp_scratch", "tmlp_scratch", "amlp_scratch", "gmlp_pretrained"),
  *("gmlp_frozen", "tmlp_frozen", "amlp_frozen"),
)


def config(setting):
  model, _, start = setting.partition("_")
  config = study.read_config(_HERE.parent / "sst2.py", f"{model}_text_small,adamw")
  config.batch_size, config.num_epochs = 64, 2
  config.eval_epochs = 0.5
  config.schedule.warmup_epochs = 0.2
  config.data.update(name="files", train_split="sst2_train.tsv", validation_split="")
  config.data.update(test_split="sst2_dev.tsv", extra_test_splits="sst2_test.tsv")
  if start == "pretrained":
    config.pretrained = _LANGUAGE_MODEL
  if start == "frozen":
    config.frozen_from = _LANGUAGE_MODEL
    config.model.num_blocks = 2
  return config


def get_study():
  return study.Study(
    title="SST-2: from scratch, from a language model, on frozen encoders",
    config=config,
    axes={"setting": _SETTINGS},
    lines=("setting",),
    notes=["AdamW at 1e-3, two epochs of the 67,349 phrases; accuracy on the dev set."],
  )


def get_config(run):
  return get_study().run_config(run)
