"""Table 3 of "Pay Attention to MLPs" in small: four gates, by the perplexity of masked words.

  python -m mixer_jax.study --study=configs/studies/gates.py --workdir=DIR --set=data.dir=TEXT \
      --set=data.vocabulary=VOCABULARY

TEXT holds wiki_train.txt, wiki_valid.txt (WikiText-2), imdb_train.txt and imdb_valid.txt (reviews, a
line each); VOCABULARY is of 8,000 entries: `python -m mixer_jax.text --out=VOCABULARY --size=8000
TEXT/wiki_train.txt TEXT/imdb_train.txt`. The models have 6 blocks of 128 channels instead of 36 of
512, and see 12 million tokens once. Published: 5.14, 4.97, 4.53, 4.35.
"""

import pathlib

from mixer_jax import study
from mixer_jax.models.gmlp import GATINGS

_HERE = pathlib.Path(__file__).parent


def config(gate):
  config = study.read_config(_HERE.parent / "mlm.py", "gmlp_text_small,adamw")
  config.model.gating = gate
  config.num_steps, config.eval_steps, config.checkpoint_steps = 3000, 1000, 500
  config.schedule.update(warmup_epochs=0.0, warmup_steps=300)
  config.data.update(
    name="files",
    train_split="wiki_train.txt+imdb_train.txt",
    test_split="wiki_valid.txt",
    extra_test_splits="imdb_valid.txt",
  )
  return config


def get_study():
  return study.Study(
    title="Gates of gMLP, masked words of WikiText-2 and of reviews",
    config=config,
    axes={"gate": tuple(GATINGS)},
    lines=("gate",),
    notes=[
      "Published for 36 blocks of 512 channels, on C4: linear 5.14, additive 4.97, multiplicative"
      " 4.53, split 4.35.",
    ],
  )


def get_config(run):
  return get_study().run_config(run)
