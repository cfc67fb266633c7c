"""What a config may not say: every field with every kind of wrong value, and random ones."""

import math

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
import ml_collections
import numpy as np
import pytest

from mixer_jax import check, data, experiment
from mixer_jax import config as config_lib
from mixer_jax.data import sources
from mixer_jax.errors import UserError
from mixer_jax.evaluate import Evaluator
from mixer_jax.study import plan
from tests.test_configs import CONFIGS, load

NAN, INF = math.nan, math.inf
# Of which type each field is, as `config.py` says it in words.
INTEGERS = """seed num_epochs batch_size accum_steps eval_batch_size steps_per_dispatch
  checkpoint_epochs mesh.data mesh.model data.workers data.read_ahead data.stored_size data.image_size data.resize data.pad
  model.patch_size model.hidden_dim model.num_blocks model.tokens_mlp_dim
  model.channels_mlp_dim model.ffn_dim model.attention_dim model.num_heads
  factor_period inverse_period decay_from""".split()
NUMBERS = """data.smallest_crop target_accuracy schedule.warmup_epochs schedule.end schedule.factor
  model.dropout_rate model.stochastic_depth model.layer_norm_epsilon model.gate_epsilon
  model.layer_scale_init learning_rate clip_norm weight_decay momentum b1 b2 eps
  initial_accumulator norm_constraint damping factor_decay""".split()
SWITCHES = """require_accelerator any_normalization model.remat model.scan_blocks data.flip data.random_crop
  nesterov identity_start""".split()
LISTS = "schedule.epochs data.mean data.std".split()
TEXTS = """on_nonfinite data.stream data.crop plain pretrained resize_tokens task model.name model.dtype model.gelu model.token_mixer
  model.normalization model.pooling model.patch_communication model.gating model.spatial
  data.name data.dir data.cache_dir data.train_split data.test_split schedule.name
  name decay damping_type estimation token_averaging norms precondition_dtype scope""".split()
WRONG = {
  "integer": [NAN, INF, 1.5, "", "3", [], [1], {}, ["a"]],
  "number": [NAN, INF, -INF, 1e300, -1e300, "", "0.1", [], [1.0], {}],
  "switch": [0, 1, 0.0, NAN, "", "True", [], {}],
  "list": [1, NAN, "", "abc", [NAN], [INF], ["a"], [[1]], {}, [0.5, 10**40]],
  "text": [0, 1.5, NAN, True, [], {}, ["a"], "no\nline", "\0", "\x1b[2J"],
}
KINDS = {"integer": INTEGERS, "number": NUMBERS, "switch": SWITCHES, "list": LISTS, "text": TEXTS}
ARGUMENTS = {"graft_cifar10": "s4,sgd,kfac"}


def leaves(config, prefix=""):
  for name, value in config.items():
    if isinstance(value, ml_collections.ConfigDict):
      yield from leaves(value, f"{prefix}{name}.")
    else:
      yield prefix + name


def kind_of(path):
  option = path.rpartition(".")[2] if path.startswith("optimizer.") else path
  (kind,) = [kind for kind, names in KINDS.items() if option in names]
  return kind


def put(config, path, value):
  *groups, name = path.split(".")
  for group in groups:
    config = config[group]
  with config.ignore_type():
    config[name] = value


def refusal(config):
  """The line by which a config is refused; None if it is not."""
  try:
    check.check(config)
  except UserError as e:
    assert "\n" not in str(e) and len(str(e)) < 1000
    return str(e)
  return None


@pytest.mark.parametrize("name", [p.stem for p in CONFIGS])
def test_every_field_refuses_what_is_not_of_its_type(name):
  base = load(name, *([ARGUMENTS[name]] if name in ARGUMENTS else []))
  assert refusal(base) is None
  for path in leaves(base):
    for value in WRONG[kind_of(path)]:
      config = base.copy_and_resolve_references()
      put(config, path, value)
      line = refusal(config)
      assert line and line.startswith(f"{path} is "), (path, value, line)
      assert "allowed: " in line


@pytest.mark.parametrize("group", ["", "model.", "data.", "optimizer.", "schedule.", "mesh."])
def test_unknown_and_missing_fields(group):
  config = load("sgd_cifar10")
  with pytest.raises(UserError, match=f"override {group}new=1: the config has no field {group}new"):
    plan.override(config, [f"{group}new=1"])
  put(config, f"{group}new", 1)
  assert refusal(config).startswith(f"{group}new is no field of a config; there are ")
  config = load("sgd_cifar10")
  part = config[group[:-1]] if group else config
  field = next(name for name in part if part[name] is not None)
  del part[field]
  assert refusal(config) == f"{group}{field} is missing from the config"


# Per field: the values at the edges, refused and taken.
EDGES = {
  "seed": ([-1, 2**31], [0, 2**31 - 1]),
  "num_epochs": ([0, -1, 2**31], [1]),
  "batch_size": ([0, -64], [1]),
  "accum_steps": ([0], [1]),
  "eval_batch_size": ([0], [1]),
  "steps_per_dispatch": ([-1], [0, 1]),
  "checkpoint_epochs": ([0], [1]),
  "mesh.data": ([-2, 2**31], [-1, 1]),
  "target_accuracy": ([-0.1, 1.01, 45], [0, 1]),
  "model.name": (["mixer", "", "resnet50"], ["gmlp_small"]),
  "model.patch_size": ([0, -4], [4, 32]),
  "model.hidden_dim": ([0, -1, 10**9], [1]),
  "model.num_blocks": ([-1, 10**6], [0, 1]),
  "model.tokens_mlp_dim": ([0], [1]),
  "model.channels_mlp_dim": ([0], [1]),
  "model.dropout_rate": ([-0.1, 1.0], [0, 0.5]),
  "model.stochastic_depth": ([-0.1, 1.0], [0, 0.5]),
  "model.layer_norm_epsilon": ([-1e-6], [0, 1e-5]),
  "model.gelu": (["relu", ""], ["tanh", "exact"]),
  "model.dtype": (["float16", "int8"], ["float32", "bfloat16"]),
  "model.token_mixer": (["softmax"], ["galerkin", "fourier", "mlp"]),
  "data.image_size": ([0, -32, 30, 10**6], [32]),
  "data.resize": ([-1, 31, 10**6], [0, 32, 40]),
  "data.pad": ([-1, 32, 100], [0, 31]),
  "data.stored_size": ([-1, 10**6], [0, 32]),
  "data.mean": ([(0.5,), (0.5,) * 4, (1e9, 0, 0)], [(0, 0, 0)]),
  "data.std": ([(0.5,), (0.5, 0.5, 0.0), (-1, 1, 1), (1e-9, 1, 1)], [(1, 1, 1)]),
  "data.train_split": (["", "train[", "..", "../x", "train[:1e3]", f"train[:{'9' * 5000}]"],
                       ["train[:90%]+test[5:]"]),
  "schedule.name": (["stairs", ""], ["constant", "step", "cosine", "linear"]),
  "schedule.warmup_epochs": ([-1, 100, 1000], [0, 99.5]),
  "schedule.end": ([-0.1, 1.1], [0, 1]),
  "schedule.factor": ([0, -1, 1.5], [0.5, 1]),
  "schedule.epochs": ([(0,), (-1,), (40, 20), (40, 40), (1e12,)], [(), (20, 40), (0.5,)]),
  "optimizer.name": (["lion", ""], ["sgd"]),
  "optimizer.learning_rate": ([-1e-3], [0, 10]),
  "optimizer.clip_norm": ([-1], [0, 1]),
  "optimizer.weight_decay": ([-1], [0, 1]),
  "optimizer.momentum": ([-0.1, 1, 9], [0, 0.99]),
  "optimizer.decay": (["none", ""], ["all", "kernels"]),
  "resize_tokens": (["stretch"], [""]),
  "task": (["segmentation", ""], ["classification"]),
}  # fmt: skip
KFAC_EDGES = {
  "damping": ([0, -1, 1e-45], [1e-8, 1]),
  "damping_type": (["full", ""], ["exact", "factored"]),
  "factor_decay": ([-0.1, 1, 2], [0, 0.99]),
  "factor_period": ([0, -1, 2**31 - 1], [1, 10**8]),
  "inverse_period": ([0, 2**31], [1, 2**31 - 1]),
  "decay_from": ([-1, 2**31], [0]),
  "norm_constraint": ([-1], [0, 1e-2]),
  "estimation": (["true", ""], ["sampled", "exact", "empirical"]),
  "token_averaging": (["mean"], ["published", "expand"]),
  "norms": (["full"], ["gradient", "diagonal"]),
  "precondition_dtype": (["float16"], ["float32", "bfloat16"]),
}


def check_edges(base, path, refused, taken):
  for value in refused:
    config = base.copy_and_resolve_references()
    put(config, path, value)
    assert path in (refusal(config) or ""), (path, value)
  for value in taken:
    config = base.copy_and_resolve_references()
    put(config, path, value)
    assert refusal(config) is None, (path, value)


def test_every_range_and_choice_at_its_edges():
  base = config_lib.default()
  base.schedule.name = "step"
  for path, (refused, taken) in EDGES.items():
    check_edges(base, path, refused, taken)
  for option, edges in KFAC_EDGES.items():
    check_edges(load("kfac_cifar10"), f"optimizer.{option}", *edges)
    graft = load("graft_cifar10", "s4,sgd,kfac")
    check_edges(graft, f"optimizer.direction.{option}", *edges)
  check_edges(load("graft_cifar10", "s4,sgd,kfac"), "optimizer.eps", [0, -1, 1e-45], [1e-16])
  check_edges(load("adam_cifar10"), "optimizer.eps", [0, -1, 1e-45], [1e-8])
  check_edges(load("adam_cifar10"), "optimizer.b2", [-1, 1], [0, 0.999])


@pytest.mark.parametrize(
  "name, overrides, message",
  [
    ("sgd_cifar10", ["optimizer.damping=1"], "optimizer.damping is no option of sgd"),
    ("sgd_cifar10", ["optimizer.name=graft"], "optimizer.magnitude is missing; graft takes two"),
    ("graft_cifar10", ["optimizer.name=sgd"], "optimizer.direction is no option of sgd"),
    (
      "graft_cifar10",
      ["optimizer.magnitude.damping=1.0"],
      "optimizer.magnitude.damping is no option of sgd",
    ),
    ("graft_cifar10", ["optimizer.direction.name=graft"], "optimizer.direction.magnitude is miss"),
    ("graft_cifar10", ["optimizer.scope=layer"], "optimizer.scope is 'layer'; allowed: tensor, gl"),
    ("sgd_cifar10", ["target_accuracy=80"], "target_accuracy is 80.0; allowed: 0 to 1"),
    ("quickstart", ["num_epochs=1", "schedule.warmup_epochs=1"], "below num_epochs (1)"),
    ("quickstart", ["model.attention_dim=64"], "model.attention_dim is no field of mixer_small"),
    ("quickstart", ["model.name=resmlp_s12"], "model.tokens_mlp_dim is no field of resmlp_s12"),
    ("quickstart", ["data.random_crop=True"], "but crops of data.resize, which is 0"),
    ("quickstart", ["data.resize=16"], "data.resize is 16; allowed: 0, or at least"),
    ("quickstart", ["data.pad=32"], "a crop may show none of the image"),
    ("quickstart", ["model.patch_size=5"], "a multiple of the patch size 5 of mixer_small"),
    ("quickstart", ["resize_tokens=block_diagonal"], "there are no weights to resize"),
  ],
)
def test_contradictions(name, overrides, message):
  config = plan.override(load(name), overrides)
  assert message in refusal(config)


@pytest.mark.parametrize(
  "assignment",
  [
    "batch_size=many", "batch_size=", "batch_size=1.5", "optimizer.learning_rate=fast",
    "data.flip=perhaps", "data.mean=abc", "data.mean=('a','b','c')", "model=mixer_b16",
    "optimizer.=1", "=1", "optimizer..name=sgd", "data.mean[0]=x", "seed", "optimizer.name",
  ],
)  # fmt: skip
def test_what_a_command_line_cannot_mean(assignment):
  config = load("quickstart")
  with pytest.raises(UserError) as caught:
    check.check(plan.override(config, [assignment]))
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


def test_a_batch_larger_than_the_test_split_is_not_padded_further(tiny_config):
  tiny_config.eval_batch_size, tiny_config.mesh.data = 2**30, 8
  evaluator = Evaluator(experiment.build(tiny_config))
  assert [mask.shape for mask in evaluator._masks] == [(96,)]  # 90 images on 8 devices


FIELDS = [p for p in leaves(load("graft_cifar10", "s4,sgd,kfac")) if p != "data.dir"]
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
  "mesh.data": st.integers(-2, 9),
  "data.image_size": st.sampled_from([8, 16, 12, 224]),
  "data.resize": st.integers(0, 64),
  "data.pad": st.integers(0, 8),
  "data.train_split": st.sampled_from(["train", "train[:5]", "test", "train[100:]", "val"]),
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
}


def build_or_refuse(config, overrides, monkeypatch):
  """Builds what training would: data, model and optimizer; the data are made up."""
  rng = np.random.default_rng(0)
  split = sources.Split(
    rng.integers(0, 255, (64, 8, 8, 3), np.uint8), np.arange(64, dtype="i4") % 4
  )
  dataset = sources.Dataset("npz", split, split, ("a", "b", "c", "d"))
  monkeypatch.setattr(data, "load", lambda _: dataset)
  config = config.copy_and_resolve_references()
  for path, value in overrides.items():
    put(config, path, value)
  try:
    run = experiment.build(config)
    assert run.tx and run.multiplier(0) <= 1
  except UserError as e:
    assert "\n" not in str(e)


@settings(max_examples=40, derandomize=True, **SETTINGS)
@given(st.fixed_dictionaries({}, optional=PLAUSIBLE))
def test_plausible_overrides_build_or_are_refused(tiny_config, overrides):
  with pytest.MonkeyPatch.context() as monkeypatch:
    build_or_refuse(tiny_config, overrides, monkeypatch)


@pytest.mark.slow
@settings(max_examples=1_000, **SETTINGS)
@given(st.fixed_dictionaries({}, optional=PLAUSIBLE))
def test_a_thousand_plausible_overrides(tiny_config, overrides):
  with pytest.MonkeyPatch.context() as monkeypatch:
    build_or_refuse(tiny_config, overrides, monkeypatch)
