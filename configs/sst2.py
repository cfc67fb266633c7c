"""Sentiment of sentences: SST-2, from scratch, from a language model, or on a frozen encoder.

  python -m mixer_jax.main --config=configs/sst2.py[:MODEL[,OPTIMIZER]]     # bundled part of SST-2
      [--config.data.name=files --config.data.dir=DIR --config.data.train_split=train.tsv \
       --config.data.test_split=dev.tsv --config.data.validation_split="" \
       --config.data.vocabulary=vocab.txt]
      [--config.data.name=glue/sst2 --config.data.test_split=validation \
       --config.data.validation_split="" --config.data.vocabulary=vocab.txt]
      [--config.pretrained=RUN_OR_BERT.safetensors]
      [--config.frozen_from=RUN_OR_BERT.safetensors]

Fine-tuning as published (Liu et al., 2021, and BERT): 5 epochs of batches of 32, with warm-up and
linear decay, AdamW at 2e-5 for models called base or large. All others, which are small or trained
from scratch, have 1e-3; --config.optimizer.learning_rate=2e-5 fine-tunes a large one of them.
"""

from mixer_jax import config as config_lib

OPTIMIZERS = {
  "adamw": dict(learning_rate=1e-3, weight_decay=0.01),
  # A factor over all words would take longer than the rest of the step.
  "kfac_adam": dict(learning_rate=1e-3, weight_decay=0.01, max_factor=2048),
}


def get_config(choice="gmlp_text_small"):
  model, optimizer = config_lib.model_and_optimizer(choice, OPTIMIZERS)
  if model.endswith(("_base", "_large")):
    optimizer.learning_rate = 2e-5
  config = config_lib.default("text_classification", model)
  config.batch_size = 32
  config.num_epochs = 5
  config.data.max_length = 64
  config.data.validation_split = "dev"
  config.optimizer = optimizer
  config.schedule.update(name="linear", warmup_epochs=0.5)
  return config
