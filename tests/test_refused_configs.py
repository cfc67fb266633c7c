"""Configs that no run may have: a wrong value in any field, made from its option, and random ones."""

import math
from typing import Mapping

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
import pytest

from mixer_jax import config as config_lib
from mixer_jax import experiment, optimizers, options
from mixer_jax.errors import UserError
from tests.test_configs import load

# Values of another type, by the option's.
WRONG = {
  int: [math.nan, math.inf, 1.5, "", "3", True, [], [1], {}, ["a"]],
  float: [math.nan, math.inf, -math.inf, 1e300, -1e300, "", "0.1", [], [1.0], {}],
  bool: [0, 1, 0.0, math.nan, "", "True", [], {}],
  tuple: [1, math.nan, "", "abc", [math.nan], [math.inf], ["a"], [[1]], {}, [0.5, 10**40]],
  str: [0, 1.5, math.nan, True, [], {}, ["a"], "no\nline", "\0", "\x1b[2J", "x" * 5000],
}


def beyond(option):
  """Values of the option's type just out of its range."""
  if option.choices:
    return ["none of them", f"{option.choices[-1]} "]
  found = []
  for bound, sign in ((option.low, -1), (option.high, 1)):
    if math.isfinite(bound):
      step = bound + sign if option.type is int else math.nextafter(bound, sign * math.inf)
      found.append(step)
  if option.type is not tuple:
    return found
  lengths = (option.length - 1, option.length + 1) if option.length else ()
  return [(x,) * (option.length or 1) for x in found] + [(option.low,) * n for n in lengths]


def within(option):
  """Values at the edges of the option's range."""
  if option.type is bool:
    return [True, False]
  if option.type is str:
    return option.choices or ["", "x" * 4096]
  edges = [bound for bound in (option.low, option.high) if math.isfinite(bound)] or [0]
  return [(x,) * (option.length or 1) for x in edges] if option.type is tuple else edges


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
  taken, nothing = within(option), [None]
  for value in (*WRONG[option.type], *beyond(option), *([] if has_default else nothing)):
    config = base.copy_and_resolve_references()
    put(config, path, value)
    line = refusal(config)
    assert line and line.startswith(f"{path} is ") and "; allowed: " in line, (path, value, line)
  for value in (*taken, *(nothing if has_default else [])):
    config = base.copy_and_resolve_references()
    put(config, path, value)
    line = refusal(config)  # maybe that it contradicts another field
    assert line != f"{path} is {options.shown(value)}; allowed: {option.allowed}", line


@pytest.mark.parametrize(
  "path", ["model.name", "optimizer.name", "optimizer.direction.name", "optimizer.magnitude"]
)
def test_names_of_groups(path):
  for value in (*WRONG[str], None, "none of them"):
    config = with_optimizer(config_lib.default(), "adam", "kfac")
    put(config, path, value)
    assert refusal(config).startswith(f"{path} is "), (path, value)


@pytest.mark.parametrize("group", ["", "data.", "schedule.", "mesh.", "model.", "optimizer."])
def test_unknown_and_missing_fields(group):
  config = load("sgd_cifar10")
  with pytest.raises(UserError, match=f"override {group}new=1: the config has no field {group}new"):
    config_lib.override(config, [f"{group}new=1"])
  put(config, f"{group}new", 1)
  noun = {"model.": "option of mixer_b4", "optimizer.": "option of sgd"}.get(
    group, "field of a config"
  )
  assert refusal(config).startswith(f"{group}new is no {noun}; there are ")
  for field, (_, has_default) in options_of(load("sgd_cifar10")).items():
    if field.rpartition(".")[0] != group[:-1]:
      continue
    config = load("sgd_cifar10")
    part = config[group[:-1]] if group else config
    del part[field.removeprefix(group)]
    assert refusal(config) == (None if has_default else f"{field} is missing from the config")
  if group:
    config = load("sgd_cifar10")
    del config[group[:-1]]
    assert refusal(config) == f"{group[:-1]} is missing from the config"
    put(config, group[:-1], 3)
    assert refusal(config).startswith(f"{group[:-1]} is 3; allowed: a group of fields")


@pytest.mark.parametrize(
  "name, overrides, message",
  [
    ("quickstart", ["model.name=mixer_smal"], "model.name is 'mixer_smal'; did you mean mixer_small"),
    ("quickstart", ["model.name=alexnet"], "model.name is 'alexnet'; allowed: mixer_s32, "),
    ("quickstart", ["optimizer.name=lion"], "optimizer.name is 'lion'; allowed: sgd, adam, "),
    ("quickstart", ["task=segments"], "task is 'segments'; allowed: image_classification"),
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
      for split in ("", "train[", "..", "../x", "train[:1e3]", f"train[:{'9' * 4000}]")
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
    "batch_size=many", "batch_size=", "batch_size=1.5", "optimizer.learning_rate=fast",
    "data.flip=perhaps", "data.mean=abc", "data.mean=('a','b','c')", "model=mixer_b16",
    "optimizer.=1", "=1", "optimizer..name=sgd", "data.mean[0]=x", "seed", "optimizer.name",
  ],
)  # fmt: skip
def test_assignments_of_no_meaning_are_refused(assignment):
  with pytest.raises(UserError) as caught:
    config_lib.check(config_lib.override(load("quickstart"), [assignment]))
  assert "\n" not in str(caught.value)


def test_parameters_larger_than_the_memory_are_refused(tiny_config):
  tiny_config.model.update(hidden_dim=10**6, channels_mlp_dim=10**6)
  with pytest.raises(
    UserError, match=r"its parameters take [\d,.]+ GiB, more than the [\d,.]+ GiB"
  ):
    experiment.build(tiny_config)


def test_more_steps_than_are_counted_are_refused(tiny_config):
  tiny_config.num_epochs = 2**31 - 1
  with pytest.raises(UserError, match="num_epochs is 2147483647, 17179869176 steps"):
    experiment.build(tiny_config)


FIELDS = [p for p in options_of(load("graft_cifar10", "s4,sgd,kfac")) if p != "data.dir"]
FIELDS += ["model.name", "optimizer.name", "optimizer.direction.name"]
ANYTHING = st.one_of(
  st.none(),
  st.booleans(),
  st.integers(),
  st.integers(-2, 70),
  st.floats(),
  st.floats(0, 1),
  st.text(max_size=12),
  st.sampled_from(["sgd", "kfac", "adam", "graft", "mixer_small", "gmlp_small", "resmlp_s12"]),
  st.sampled_from(["step", "cosine", "linear", "exact", "all", "train[:50%]", "galerkin", "tanh"]),
  st.lists(st.one_of(st.integers(-1, 9), st.floats(), st.text(max_size=3)), max_size=4),
  st.dictionaries(st.text(max_size=5), st.integers(), max_size=2),
)
OVERRIDES = st.dictionaries(st.sampled_from(FIELDS), ANYTHING, min_size=1, max_size=4)
SETTINGS = dict(deadline=None, suppress_health_check=list(HealthCheck), database=None)


def refused_or_none(overrides):
  config = load("graft_cifar10", "s4,sgd,kfac")
  for path, value in overrides.items():
    try:
      put(config, path, value)
    except (ValueError, TypeError, KeyError):  # of ml_collections: no such value can be there
      return
  refusal(config)


@settings(max_examples=300, derandomize=True, **SETTINGS)
@given(OVERRIDES)
@pytest.mark.thorough
def test_random_overrides_are_taken_or_refused_in_one_line(overrides):
  refused_or_none(overrides)


@pytest.mark.slow
@settings(max_examples=10_000, **SETTINGS)
@given(OVERRIDES)
def test_ten_thousand_random_overrides(overrides):
  refused_or_none(overrides)


PLAUSIBLE = {
  "batch_size": st.sampled_from([8, 16, 33, 64, 10**6]),
  "accum_steps": st.integers(1, 5),
  "eval_batch_size": st.sampled_from([1, 7, 64, 10**9]),
  "steps_per_dispatch": st.integers(0, 2**31 - 1),
  "num_epochs": st.integers(1, 2**31 - 1),
  "num_steps": st.sampled_from([0, 1, 1000, 2**31 - 1]),
  "eval_steps": st.sampled_from([0, 1, 2**31 - 1]),
  "eval_epochs": st.floats(1e-6, 10),
  "mesh.data": st.integers(-2, 9),
  "data.image_size": st.sampled_from([8, 16, 12, 224]),
  "data.resize": st.integers(0, 64),
  "data.pad": st.integers(0, 8),
  "data.train_split": st.sampled_from(["train", "train[:5]", "test", "train[100:]", "val"]),
  "data.validation_split": st.sampled_from(["", "train[:5]", "test", "val"]),
  "model.name": st.sampled_from(["mixer_small", "gmlp_small", "amlp_small", "resmlp_s12"]),
  "model.patch_size": st.integers(1, 9),
  "model.hidden_dim": st.sampled_from([1, 8, 10, 10**6]),
  "model.num_blocks": st.integers(0, 2),
  "model.tokens_mlp_dim": st.sampled_from([None, 1, 4]),
  "model.channels_mlp_dim": st.sampled_from([None, 1, 4, 10**6]),
  "model.token_mixer": st.sampled_from([None, "mlp", "galerkin"]),
  "model.num_heads": st.integers(1, 3),
  "optimizer.name": st.sampled_from(["sgd", "adam", "adamw", "lamb", "adagrad"]),
  "optimizer.momentum": st.sampled_from([None, 0.0, 0.9]),
  "optimizer.nesterov": st.sampled_from([None, True]),
  "schedule.warmup_epochs": st.floats(0, 2),
  "schedule.warmup_steps": st.sampled_from([0, 1, 10**6]),
}


def build_or_refuse(config, overrides):
  """Builds data, model and optimizer as training does."""
  config = config.copy_and_resolve_references()
  for path, value in overrides.items():
    put(config, path, value)
  try:
    run = experiment.build(config)
    assert run.optimizer and 0 <= run.multiplier(0) <= 1
    assert 1 <= run.clock.eval_every and run.clock.epoch(1) > 0
  except UserError as e:
    assert "\n" not in str(e)


@settings(max_examples=40, derandomize=True, **SETTINGS)
@given(st.fixed_dictionaries({}, optional=PLAUSIBLE))
@pytest.mark.thorough
def test_plausible_overrides_build_or_are_refused(tiny_config, overrides):
  build_or_refuse(tiny_config, overrides)


@pytest.mark.slow
@settings(max_examples=1_000, **SETTINGS)
@given(st.fixed_dictionaries({}, optional=PLAUSIBLE))
def test_a_thousand_plausible_overrides(tiny_config, overrides):
  build_or_refuse(tiny_config, overrides)


def test_a_misspelt_option_of_an_optimizer_and_a_missing_rate_are_told():
  config = config_lib.default()
  config.optimizer = config_lib.optimizer("kfac", learning_rat=0.1)
  line = "optimizer.learning_rat is no option of kfac; there are learning_rate, "
  assert refusal(config).startswith(line)
  config.optimizer = config_lib.optimizer("kfac")
  assert refusal(config) == "optimizer.learning_rate is None; allowed: a finite number"
