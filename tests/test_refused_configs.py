"""Configs that no run may have: a wrong value in any field, and fields that contradict each other."""

import math
from typing import Mapping

import pytest

from mixer_jax import config as config_lib
from mixer_jax import optimizers, options
from mixer_jax.errors import UserError
from tests.test_configs import load


def beyond(option):
  """Values of the option's type just out of its range."""
  if option.choices:
    return ["none of them"]
  bounds = [(b, s) for b, s in ((option.low, -1), (option.high, 1)) if math.isfinite(b)]
  outside = [b + s if option.type is int else math.nextafter(b, s * math.inf) for b, s in bounds]
  return [(x,) * (option.length or 1) for x in outside] if option.type is tuple else outside


def options_of(config):
  """The option of every field by path, and whether it has a default that None stands for."""
  found = {name: (option, option.optional) for name, option in options.of(config_lib.Run).items()}
  for name, made_of in config_lib._groups(config.task).items():
    several = isinstance(made_of, Mapping)
    for field, option in options.of(made_of[config[name].name] if several else made_of).items():
      found[f"{name}.{field}".lstrip(".")] = option, several or option.optional
  return found | options_of_optimizer(config.optimizer, "optimizer")


def options_of_optimizer(config, path):
  own = options.of(
    optimizers.Graft if config.name == "graft" else optimizers.OPTIMIZERS[config.name]
  )
  found = {f"{path}.{name}": (option, True) for name, option in own.items()}
  if config.name != "graft":
    return found | {f"{path}.{k}": (o, False) for k, o in options.of(optimizers.General).items()}
  for side in ("magnitude", "direction"):
    found |= options_of_optimizer(config[side], f"{path}.{side}")
  return found


def put(config, path, value):
  *groups, name = path.split(".")
  for group in groups:
    config = config[group]
  with config.ignore_type():
    config[name] = value


def refusal(config):
  """The line by which a config is refused; None if it is not."""
  try:
    config_lib.check(config)
  except UserError as e:
    assert str(e).isprintable() and len(str(e)) < 5000
    return str(e)
  return None


def with_optimizer(config, *names):
  parts = [config_lib.optimizer(name, learning_rate=0.1) for name in names]
  config.optimizer = config_lib.grafted(*parts) if len(parts) == 2 else parts[0]
  return config


def bases():
  """Configs that together have every field."""
  yield with_optimizer(config_lib.default(model="mixer_small"), "kfac")
  yield with_optimizer(config_lib.default(model="resmlp_s12"), "adam")
  yield with_optimizer(config_lib.default(model="gmlp_small"), "lamb")
  yield with_optimizer(config_lib.default("docs.own_task:Derivative"), "sgd")
  for names in (["adamw"], ["adagrad"], ["adam", "kfac"]):
    yield with_optimizer(config_lib.default(), *names)


def test_every_field_refuses_other_values_than_its_option_takes():
  seen = set()
  for base in bases():
    assert refusal(base) is None
    for path, (option, has_default) in options_of(base).items():
      if (path, option) in seen:
        continue
      seen.add((path, option))
      put_and_check(base, path, option, has_default)
  assert len(seen) > 120


def put_and_check(base, path, option, has_default):
  for value in (*beyond(option), *([] if has_default else [None])):
    config = base.copy_and_resolve_references()
    put(config, path, value)
    line = refusal(config)
    assert line and line.startswith(f"{path} is ") and "; allowed: " in line, (path, value, line)


@pytest.mark.parametrize("path", ["model.name", "optimizer.name", "optimizer.direction.name"])
def test_names_of_groups(path):
  for value in (None, "none of them"):
    config = with_optimizer(config_lib.default(), "adam", "kfac")
    put(config, path, value)
    assert refusal(config).startswith(f"{path} is "), (path, value)


@pytest.mark.parametrize("group", ["", "data.", "schedule.", "model.", "optimizer."])
def test_unknown_fields(group):
  config = load("sgd_cifar10")
  with pytest.raises(UserError, match=f"override {group}new=1: .*new"):
    config_lib.override(config, [f"{group}new=1"])
  put(config, f"{group}new", 1)
  assert refusal(config).startswith(f"{group}new is no ")


@pytest.mark.parametrize(
  "name, overrides, message",
  [
    ("quickstart", ["model.name=mixer_smal"], "model.name is 'mixer_smal'; did you mean mixer_small"),
    ("quickstart", ["model.name=alexnet"], "model.name is 'alexnet'; allowed: mixer_s32, "),
    ("quickstart", ["optimizer.name=lion"], "optimizer.name is 'lion'; allowed: sgd, adam, "),
    ("sgd_cifar10", ["optimizer.damping=1"], "optimizer.damping is no option of sgd"),
    ("sgd_cifar10", ["optimizer.name=graft"], "optimizer.magnitude is missing; graft takes two"),
    ("graft_cifar10", ["optimizer.name=sgd"], "optimizer.direction is no option of sgd"),
    (
      "graft_cifar10",
      ["optimizer.magnitude.damping=1.0"],
      "optimizer.magnitude.damping is no option of sgd",
    ),
    ("graft_cifar10", ["optimizer.direction.name=graft"], "optimizer.direction.magnitude is miss"),
    ("quickstart", ["num_epochs=1", "schedule.warmup_epochs=1"], "below the run's length, 1 epochs"),
    ("quickstart", ["schedule.name=onecycle"], "its own warm-up: set schedule.rise"),
    ("quickstart", ["schedule.epochs=(4,2)"], "schedule.epochs is (4, 2); it must rise"),
    ("quickstart", ["model.attention_dim=64"], "model.attention_dim is no option of mixer_small"),
    ("quickstart", ["model.name=resmlp_s12"], "model.tokens_mlp_dim is no option of resmlp_s12"),
    ("quickstart", ["data.random_crop=True"], "but data.resize, the side of the images that it crops, is 0"),
    ("quickstart", ["data.resize=16"], "data.resize is 16; allowed: 0, or at least"),
    ("quickstart", ["data.pad=32"], "a crop may show none of the image"),
    ("quickstart", ["model.patch_size=5"], "a multiple of the patch size 5 of mixer_small"),
    ("quickstart", ["resize_tokens=block_diagonal"], "there are no weights to resize"),
    *(
      ("quickstart", [f"data.train_split={split}"], "not a split")
      for split in ("", "train[", "../x")
    ),
    ("quickstart", ["data.test_sets=validation=x.npz"], "has 'validation', the name of a split"),
    *(
      (name, [f"data.{split}_split="], f"data.{split}_split='': not a split")
      for name in ("quickstart", "segmentation", "mlm")
      for split in ("train", "test")
    ),
  ],
)  # fmt: skip
def test_contradictions(name, overrides, message):
  assert message in refusal(config_lib.override(load(name), overrides))


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
  assert refusal(config_lib.override(load("quickstart"), overrides)) is None


@pytest.mark.parametrize(
  "assignment",
  [
    "batch_size=many", "batch_size=1.5", "optimizer.learning_rate=fast", "data.flip=perhaps",
    "data.mean=abc", "model=mixer_b16", "optimizer.=1", "optimizer..name=sgd", "seed",
  ],
)  # fmt: skip
def test_assignments_of_no_meaning_are_refused(assignment):
  with pytest.raises(UserError, match=assignment.partition("=")[0]):
    config_lib.override(load("quickstart"), [assignment])


def test_a_misspelt_option_of_an_optimizer_and_a_missing_rate_are_told():
  config = config_lib.default()
  config.optimizer = config_lib.optimizer("kfac", learning_rat=0.1)
  assert "did you mean optimizer.learning_rate?" in refusal(config)
  config.optimizer = config_lib.optimizer("kfac")
  assert refusal(config).startswith("optimizer.learning_rate is None")
