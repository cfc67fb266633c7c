"""Every config loads, survives JSON, and holds the study's settings."""

import importlib.util
import json
import pathlib

import jax
import ml_collections
import pytest

from mixer_jax import check, models, optim, pretrained
from mixer_jax import config as config_lib
from mixer_jax.errors import UserError

CONFIGS = sorted((pathlib.Path(__file__).parent.parent / "configs").glob("*.py"))


def load(name, *args):
  path = next(p for p in CONFIGS if p.stem == name)
  spec = importlib.util.spec_from_file_location(f"configs_{name}", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.get_config(*args)


@pytest.mark.parametrize("name", [p.stem for p in CONFIGS])
def test_loads_and_survives_json(name):
  config = load(name)
  assert config.keys() == config_lib.default().keys()
  again = ml_collections.ConfigDict(json.loads(config.to_json()))
  assert json.loads(again.to_json()) == json.loads(config.to_json())
  overrides = {k: v for k, v in config.model.items() if k != "name" and v is not None}
  models.build(config.model.name, 10, **overrides)


@pytest.mark.parametrize("dataset", ["cifar10", "cifar100"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "kfac"])
@pytest.mark.parametrize("variant", ["s4", "b4", "s16", "b16"])
def test_the_study_s_settings(dataset, optimizer, variant):
  config = load(f"{optimizer}_{dataset}", variant)
  assert (config.batch_size, config.num_epochs) == (64, 100)
  assert (config.schedule.name, config.schedule.epochs, config.schedule.factor) == (
    "step",
    (40, 80),
    0.1,
  )
  assert config.optimizer.name == optimizer
  assert config.optimizer.learning_rate == {"sgd": 1e-2}.get(optimizer, 1e-3)
  assert config.optimizer.weight_decay == 1e-4
  assert config.optimizer.decay == "all"
  assert config.model.name == f"mixer_{variant}"
  large = variant.endswith("16")
  sizes = (config.data.resize, config.data.image_size, config.data.pad)
  assert sizes == ((256, 224, 0) if large else (0, 32, 4))
  statistics = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "cifar100": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
  }
  assert (config.data.mean, config.data.std) == statistics[dataset]
  targets = {
    "cifar10": dict(s4=0.8, b4=0.8, s16=0.7, b16=0.65),
    "cifar100": dict(s4=0.0, b4=0.45, s16=0.0, b16=0.4),
  }
  assert config.target_accuracy == targets[dataset][variant]


def test_the_study_s_kfac():
  options = load("kfac_cifar100").optimizer
  expected = dict(
    momentum=0.9,
    damping=1e-3,
    damping_type="exact",
    norm_constraint=1e-2,
    factor_decay=0.95,
    factor_period=10,
    inverse_period=100,
    estimation="sampled",
    token_averaging="published",
    norms="gradient",
    identity_start=True,
    decay_from=200,
  )
  assert {k: options[k] for k in expected} == expected


def test_grafting_takes_both_orders():
  for sides in ("sgd,kfac", "kfac,sgd", "kfac,kfac", "sgd,sgd"):
    config = load("graft_cifar10", f"b16,{sides}")
    assert config.model.name == "mixer_b16"
    optimizer = config.optimizer
    assert f"{optimizer.magnitude.name},{optimizer.direction.name}" == sides
    assert (optimizer.scope, optimizer.eps) == ("tensor", 1e-16)
    for side in (optimizer.magnitude, optimizer.direction):
      assert side.learning_rate == {"sgd": 1e-2, "kfac": 1e-3}[side.name]
  with pytest.raises(UserError, match="'b16,sgd'; allowed: MODEL,MAGNITUDE,DIRECTION"):
    load("graft_cifar10", "b16,sgd")


def test_the_default_model_is_b4():
  assert load("kfac_cifar100").model.name == "mixer_b4"
  with pytest.raises(UserError, match="'b5'; allowed: s4, b4, s16, b16, b16_pt"):
    load("kfac_cifar100", "b5")


SHAPES_ONLY = {"hidden_dim": 8, "num_blocks": 1, "patch_size": 4}


@pytest.mark.parametrize(
  "name, fields",
  [
    ("mixer_small", {}),
    ("mixer_small", dict(token_mixer="galerkin", num_heads=2)),
    ("resmlp_s12", dict(pooling="class_mlp")),
    ("resmlp_s12", dict(patch_communication="separable", normalization="layer_norm")),
    ("gmlp_small", dict(attention_dim=4)),
    ("gmlp_small", dict(spatial="toeplitz")),
  ],
)
def test_decay_mask_keeps_weights_and_nothing_else(name, fields):
  model = models.build(name, 10, **SHAPES_ONLY | fields)
  images = jax.ShapeDtypeStruct((1, 8, 8, 3), "float32")
  params = jax.eval_shape(model.init, jax.random.key(0), images)["params"]
  decayed = {True: set(), False: set()}
  for path, mask in jax.tree_util.tree_leaves_with_path(optim.decay_mask(params)):
    decayed[mask].add(path[-1].key)
  assert decayed[True] <= {"kernel", "diagonals"} and "kernel" in decayed[True]
  assert decayed[False] <= {"bias", "scale", "embedding"} and "bias" in decayed[False]


@pytest.mark.parametrize("dataset", ["cifar10", "cifar100"])
def test_fine_tuning_asks_for_the_weights(dataset):
  config = load(f"kfac_{dataset}", "b16_pt")
  assert config.model.name == "mixer_b16"
  assert (config.data.resize, config.data.image_size) == (256, 224)
  assert config.target_accuracy == {"cifar10": 0.9, "cifar100": 0.7}[dataset]
  public = pretrained.CATALOG["google/imagenet21k/Mixer-B_16"].normalization
  assert (config.data.mean, config.data.std) == (public.mean, public.std)
  with pytest.raises(UserError, match="pretrained is missing.*--config.pretrained=FILE"):
    check.check(config)
  config.pretrained = "w.npz"
  check.check(config)
