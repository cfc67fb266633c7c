"""Masked language models of all-MLPs, on a text file or the bundled sample.

  python -m mixer_jax.main --config=configs/mlm.py[:MODEL[,OPTIMIZER]] [--config.data.name=files \
      --config.data.dir=DIR --config.data.train_split=train.txt --config.data.test_split=valid.txt \
      --config.data.vocabulary=vocab.txt]

MODEL is gmlp_text_small or any other encoder: gmlp_text_36 is that of the gates of "Pay Attention
to MLPs" (Liu et al., 2021, Table 3). Its training: AdamW with a peak of 7e-4, a warm-up of 10,000
steps, a linear decay, weight decay 0.01, 125,000 batches of 2,048 sequences of 128 tokens:

  python -m mixer_jax.main --config=configs/mlm.py:gmlp_text_36,adamw \
      --config.num_steps=125000 --config.batch_size=2048 \
      --config.schedule.warmup_epochs=0 --config.schedule.warmup_steps=10000 \
      --config.optimizer.eps=1e-6 --config.data.name=c4/realnewslike \
      --config.data.test_split=validation --config.data.vocabulary=vocab.txt

One accelerator takes such a batch in parts: --config.accum_steps=16 --config.model.remat=True
--config.model.dtype=bfloat16.
"""

from mixer_jax import config as config_lib

OPTIMIZERS = {
  "adamw": dict(learning_rate=7e-4, weight_decay=0.01),
  # A factor over all words would take longer than the rest of the step.
  "kfac_adam": dict(learning_rate=2e-3, weight_decay=0.01, max_factor=2048),
}


def get_config(choice="gmlp_text_small"):
  model, optimizer = config_lib.model_and_optimizer(choice, OPTIMIZERS)
  config = config_lib.default("masked_lm", model)
  config.batch_size = 32
  config.num_epochs = 20
  config.optimizer = optimizer
  if model.endswith("_small") and not model.startswith("bert"):
    config.optimizer.learning_rate *= 3
  config.schedule.update(name="linear", warmup_epochs=1.0)
  return config
