"""Configs that no run may have: mistakes in names and values, and fields that contradict each other."""

import pytest

from mixer_jax import config as config_lib
from mixer_jax.errors import UserError
from tests.test_configs import load

# A config, assignments, and words of the line that refuses them.
REFUSED = [
  # Names, of which a near one is offered
  ("quickstart", ["model.name=mixer_smal"], "model.name is 'mixer_smal'; did you mean mixer_small"),
  ("quickstart", ["optimizer.name=lion"], "optimizer.name is 'lion'"),
  ("quickstart", ["task=segments"], "task is 'segments'"),
  ("quickstart", ["data.new=1"], "has no field data.new"),
  ("graft_cifar10", ["optimizer.direction.name=lion"], "optimizer.direction.name is 'lion'"),
  # Options of another model or optimizer
  ("sgd_cifar10", ["optimizer.damping=1"], "optimizer.damping is no option of sgd"),
  ("graft_cifar10", ["optimizer.magnitude.damping=1.0"], "optimizer.magnitude.damping is no option"),
  ("sgd_cifar10", ["optimizer.name=graft"], "optimizer.magnitude is missing"),
  ("graft_cifar10", ["optimizer.name=sgd"], "optimizer.direction is no option of sgd"),
  ("quickstart", ["model.name=resmlp_s12"], "model.tokens_mlp_dim is no option of resmlp_s12"),
  # Values of another type
  ("quickstart", ["batch_size=many"], "batch_size"),
  ("quickstart", ["optimizer.learning_rate=fast"], "learning_rate"),
  ("quickstart", ["data.mean=abc"], "mean"),
  ("quickstart", ["optimizer.name"], "optimizer.name"),
  # Fields that contradict each other
  ("quickstart", ["num_epochs=1", "schedule.warmup_epochs=1"], "below the run's length, 1 epochs"),
  ("quickstart", ["schedule.name=onecycle"], "set schedule.rise"),
  ("quickstart", ["schedule.epochs=(4,2)"], "schedule.epochs is (4, 2)"),
  ("quickstart", ["data.random_crop=True"], "data.resize"),
  ("quickstart", ["data.resize=16"], "data.resize is 16"),
  ("quickstart", ["data.pad=32"], "a crop may show none of the image"),
  ("quickstart", ["model.patch_size=5"], "a multiple of the patch size 5"),
  ("quickstart", ["resize_tokens=block_diagonal"], "there are no weights to resize"),
  ("quickstart", ["data.train_split=train["], "not a split"),
  ("quickstart", ["data.train_split=../x"], "not a split"),
  ("quickstart", ["data.test_sets=validation=x.npz"], "the name of a split"),
]  # fmt: skip


@pytest.mark.parametrize("name, overrides, words", REFUSED)
def test_a_mistake_is_one_line_that_names_its_field(name, overrides, words):
  with pytest.raises(UserError) as caught:
    config_lib.check(config_lib.override(load(name), overrides))
  assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
  "overrides",
  [
    ["data.train_split=train[:90%]+test[5:]"],
    ["schedule.warmup_steps=500"],  # a step is no epoch: the data say how many there are
    ["num_steps=50", "schedule.warmup_epochs=20"],
    ["num_epochs=1", "schedule.warmup_epochs=0.99"],
    ["data.resize=32"],
    ["data.pad=31"],
    ["model.num_blocks=0"],
  ],
)  # fmt: skip
def test_apparent_contradictions_are_taken(overrides):
  config_lib.check(config_lib.override(load("quickstart"), overrides))


@pytest.mark.parametrize(
  "given, named", [(dict(learning_rat=0.1), "learning_rat"), ({}, "learning_rate")]
)
def test_a_misspelt_option_of_an_optimizer_and_a_missing_rate_are_named(given, named):
  config = config_lib.default()
  config.optimizer = config_lib.optimizer("kfac", **given)
  with pytest.raises(UserError, match=f"optimizer.{named} is "):
    config_lib.check(config)
