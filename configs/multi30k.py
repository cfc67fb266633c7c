"""English to German, on a bundled toy pair, on Multi30k, or on any aligned files.

  python -m mixer_jax.main --config=configs/multi30k.py[:MODEL[,OPTIMIZER]]      # the bundled sample
  python -m mixer_jax.text --kind=bpe --out=bpe.json --size=8000 DIR/train.en DIR/train.de
  python -m mixer_jax.main --config=configs/multi30k.py[:MODEL[,OPTIMIZER]] \
      --config.data.name=files --config.data.dir=DIR --config.data.vocabulary=bpe.json \
      --config.data.validation_split=val --config.data.test_split=test_2016_flickr

DIR has train.en and train.de, val.en and val.de, test_2016_flickr.en and test_2016_flickr.de, maybe
as .gz. MODEL is resmlp_translate_small, transformer_translate_small, or one of 6 or 12 blocks.
OPTIMIZER is adam as of "Attention is all you need" (Vaswani et al., 2017), kfac_adam, or adagrad as
of ResMLP (Touvron et al., 2022, Section 3.5): rate 0.2, 32,000 steps of warm-up, batches of many
more tokens than here:

  python -m mixer_jax.main --config=configs/multi30k.py:resmlp_translate_6,adagrad \
      --config.data.name=wmt14_translate/de-en \
      --config.data.vocabulary=bpe.json --config.data.batch_tokens=32768 \
      --config.data.test_split=test --config.data.validation_split=validation \
      --config.schedule.name=constant --config.schedule.warmup_steps=32000 --config.num_steps=300000
"""

from mixer_jax import config as config_lib

OPTIMIZERS = {
  "adam": dict(learning_rate=2e-3, b2=0.98, eps=1e-9),
  "adagrad": dict(learning_rate=0.2),
  # A factor over all words would take longer than the rest of the step.
  "kfac_adam": dict(learning_rate=2e-3, max_factor=2048),
}


def get_config(choice="resmlp_translate_small"):
  model, optimizer = config_lib.model_and_optimizer(choice, OPTIMIZERS)
  config = config_lib.default("translation", model)
  config.batch_size = 8  # every batch is a multiple of it
  config.num_epochs = 30
  config.patience = 8
  config.data.max_length = 64
  config.data.batch_tokens = 2048
  config.data.validation_split = "dev"
  config.optimizer = optimizer
  config.schedule.update(name="rsqrt", warmup_epochs=2.0)
  return config
