"""A task of your own: by how much was an image turned? `python docs/own_task.py`.

Predicting rotations is a way to learn from images without labels (Gidaris et al., 2018,
https://arxiv.org/abs/1803.07728). A task says what a batch is, what is lost and what is
measured; here only the batch differs from classification.
"""

import dataclasses

import jax
import jax.numpy as jnp

from mixer_jax import config as config_lib
from mixer_jax import experiment, in_memory, tasks


class Rotation(tasks.Classification):
  """Classes 0 to 3: quarter turns, counter-clockwise."""

  def batch(self, rng, images, labels, *, train):
    """Turns normalised images; the labels of the data set are not looked at."""
    turns = jnp.arange(len(images)) % 4
    if train:
      rng, turn_rng = jax.random.split(rng)
      turns = jax.random.randint(turn_rng, turns.shape, 0, 4)
    upright = super().batch(rng, images, labels, train=train)["image"]
    turned = jnp.stack([jnp.rot90(upright, k, axes=(1, 2)) for k in range(4)])
    return {"image": turned[turns, jnp.arange(len(images))], "label": turns}


def main(num_epochs=4):
  config = config_lib.default()
  config.num_epochs = num_epochs
  config.model = config_lib.model(
    "mixer_small",
    patch_size=8,
    hidden_dim=128,
    num_blocks=2,
    tokens_mlp_dim=64,
    channels_mlp_dim=256,
  )
  config.optimizer = config_lib.optimizer(
    "kfac", learning_rate=0.02, factor_decay=0.8, inverse_period=20
  )
  config.schedule.update(name="cosine", warmup_epochs=0.5)
  run = experiment.build(config)
  model = experiment.build_model(config.model, num_classes=4)
  run = dataclasses.replace(run, task=Rotation(model, run.task.images))
  for _, row in in_memory.epochs(run):
    print(f"epoch {row['epoch']}: {row['test/top1']:.1%} of the turns are right")
  return row["test/top1"]


if __name__ == "__main__":
  main()
