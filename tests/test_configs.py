"""Every config loads, survives JSON, and holds the study's settings."""

import json
import pathlib

import jax
import numpy as np
import pytest

from mixer_jax import config as config_lib
from mixer_jax import models, optimizers, options, pretrained, tasks
from mixer_jax.errors import UserError
from mixer_jax.study import plan

CONFIGS = sorted((pathlib.Path(__file__).parent.parent / "configs").glob("*.py"))


def load(name, *args):
  return plan.read_config(next(p for p in CONFIGS if p.stem == name), *args)


@pytest.mark.parametrize("name", [p.stem for p in CONFIGS])
def test_loads_and_survives_json(name):
  config = load(name)
  if config.get("pretrained") == config_lib.REQUIRED:
    config.pretrained = "weights.npz"
  assert config.keys() == config_lib.default(config.task, config.model.name).keys()
  config_lib.check(config)
  stored = json.loads(config.to_json())
  assert json.loads(config_lib.restored(stored).to_json()) == stored
  if config.task == "image_classification":
    models.build(config.model.name, 10, **options.given(config.model))


def test_resmlp_s_recipe():
  """DeiT's numbers, and those that ResMLP's paper changes."""
  config = load("resmlp_imagenet")
  augment = config.augment
  assert (augment.policy, augment.magnitude, augment.magnitude_noise) == ("rand", 9.0, 0.5)
  assert (augment.operations, augment.probability, augment.increasing) == (2, 0.5, True)
  assert (augment.mixup, augment.cutmix, augment.switch, augment.mix) == (0.8, 1.0, 0.5, "batch")
  assert (augment.erasing, config.label_smoothing, config.data.repeats) == (0.25, 0.1, 3)
  assert (config.data.crop, config.data.smallest_crop) == ("inception", 0.08)
  assert (config.num_epochs, config.ema_decay, config.schedule.warmup_epochs) == (400, 0.99996, 5)
  optimizer = config.optimizer
  assert (optimizer.name, optimizer.learning_rate, optimizer.weight_decay) == ("lamb", 5e-3, 0.2)
  assert (optimizer.clip_norm, config.model.stochastic_depth) == (1.0, 0.05)
  assert round(config.data.image_size / config.data.resize, 2) == 0.9
  plain = load("resmlp_imagenet", "resmlp_s24,old_fashioned")
  assert (plain.model.name, plain.num_epochs, plain.augment.policy) == ("resmlp_s24", 90, "")
  taught = load("resmlp_imagenet", "resmlp_s24,distilled")
  distillation, teacher = taught.distillation, pretrained.CATALOG[taught.distillation.teacher]
  assert (taught.model.name, distillation.kind, distillation.weight) == ("resmlp_s24", "hard", 0.5)
  config_lib.check(taught)
  assert teacher.model == "regnety_160" and taught.augment.to_dict() == augment.to_dict()
  for name, choice in (("resmlp_imagenet", "resmlp_s12,x"), ("resmlp_cifar", "x")):
    with pytest.raises(UserError, match="the recipe 'x'; allowed: deit, (distilled, )?old_fash"):
      load(name, choice)
  for recipe in ("deit", "old_fashioned"):
    config_lib.check(load("resmlp_cifar", recipe))


def test_transfer_s_recipes():
  """DeiT's transfer keeps its augmentation but erasing; Mixer's has ViT's lengths."""
  config = load("transfer", "oxford_flowers102")
  optimizer, augment = config.optimizer, config.augment
  assert (optimizer.name, optimizer.learning_rate, optimizer.weight_decay) == ("sgd", 0.01, 1e-4)
  assert (config.batch_size, config.num_epochs, config.model.name) == (768, 1000, "resmlp_s12")
  assert (augment.policy, augment.mixup, augment.erasing) == ("rand", 0.8, 0.0)
  assert (config.data.crop, config.data.train_split) == ("inception", "train+validation")
  assert config.data.mean == (0.485, 0.456, 0.406)
  config = load("transfer", "cifar100,mixer_b16,mixer")
  assert (config.batch_size, config.num_steps, config.optimizer.clip_norm) == (512, 10_000, 1.0)
  assert (config.data.mean, config.augment.smallest_area) == ((0.5, 0.5, 0.5), 0.05)
  with pytest.raises(UserError, match="pretrained is missing"):
    config_lib.check(config)
  for choice in (
    "cifar10",
    "oxford_iiit_pet,mixer_b16,mixer",
    "cars196",
    "folder,,small",
    "sample,,small",
  ):
    config = load("transfer", choice)
    config.pretrained = ""
    config_lib.check(config)
  with pytest.raises(UserError, match="the recipe 'x'; allowed: deit, mixer, small"):
    load("transfer", "cifar10,resmlp_s12,x")
  with pytest.raises(UserError, match=r"allowed: DATASET\[,MODEL\[,RECIPE\]\]"):
    load("transfer", "cifar10,resmlp_s12,small,x")


@pytest.mark.parametrize("dataset", ["cifar10", "cifar100"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "kfac"])
@pytest.mark.parametrize("variant", ["s4", "b4", "s16", "b16"])
def test_the_study_s_settings(dataset, optimizer, variant):
  config = load(f"{optimizer}_{dataset}", variant)
  config_lib.check(config)
  assert (config.batch_size, config.num_epochs) == (64, 100)
  schedule = config.schedule
  assert (schedule.name, schedule.epochs, schedule.factor) == ("step", (40, 80), 0.1)
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
  assert config.target == targets[dataset][variant]


@pytest.mark.parametrize("name", ["sample", "cifar10", "mnist"])
@pytest.mark.first(1)
def test_autoencoders_are_traced(name):
  """With K-FAC, on shapes alone: MNIST would take a network."""
  config = load("autoencoder", name)
  config_lib.check(config)
  task = tasks.find(config.task)(config)
  params = jax.eval_shape(task.init, jax.random.key(0))["params"]
  side = config.data.image_size
  assert (side, params["code"]["bias"].shape) == ({"sample": (16, (32,))}.get(name, (side, (30,))))
  batch = {"image": jax.ShapeDtypeStruct((config.batch_size, side * side), np.float32)}
  predict = lambda params, batch: task.predict({"params": params}, batch)
  problem = optimizers.Problem(predict, params, batch, task.likelihood)
  tx = optimizers.build(config.optimizer, lambda count: 1.0, problem)
  key = jax.random.key(0)

  def step(params, batch):
    loss = lambda p: task.loss({"params": p}, batch, key)[0].value()
    return tx.update(jax.grad(loss)(params), tx.init(params), params, batch=batch, rng=key)

  updates, _ = jax.eval_shape(step, params, batch)
  shapes = lambda tree: jax.tree.map(lambda x: x.shape, tree)
  assert shapes(updates) == shapes(params)


STUDY_S_KFAC = dict(
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


def test_the_study_s_kfac():
  found = load("kfac_cifar100").optimizer
  assert {k: found[k] for k in STUDY_S_KFAC} == STUDY_S_KFAC


def test_grafting_takes_both_orders():
  for sides in ("sgd,kfac", "kfac,sgd", "kfac,kfac", "sgd,sgd"):
    config = load("graft_cifar10", f"b16,{sides}")
    config_lib.check(config)
    assert config.model.name == "mixer_b16"
    optimizer = config.optimizer
    assert f"{optimizer.magnitude.name},{optimizer.direction.name}" == sides
    assert (optimizer.scope, optimizer.eps) == ("tensor", 1e-16)
    for side in (optimizer.magnitude, optimizer.direction):
      assert side.learning_rate == {"sgd": 1e-2, "kfac": 1e-3}[side.name]
  with pytest.raises(UserError, match="'b16,sgd'; allowed: MODEL,MAGNITUDE,DIRECTION"):
    load("graft_cifar10", "b16,sgd")


@pytest.mark.parametrize("dataset", ["cifar10", "cifar100"])
def test_fine_tuning_asks_for_the_weights(dataset):
  config = load(f"kfac_{dataset}", "b16_pt")
  assert config.model.name == "mixer_b16"
  assert (config.data.resize, config.data.image_size) == (256, 224)
  assert config.target == {"cifar10": 0.9, "cifar100": 0.7}[dataset]
  public = pretrained.CATALOG["google/imagenet21k/Mixer-B_16"].normalization
  assert (config.data.mean, config.data.std) == (public.mean, public.std)
  with pytest.raises(UserError, match="pretrained is missing.*--config.pretrained=VALUE"):
    config_lib.check(config)
  config.pretrained = "w.npz"
  config_lib.check(config)


def test_options_that_are_gone_stop_a_begun_run_only_if_they_were_set():
  """A config has the options of all optimizers, None for those that are not the chosen one's."""
  stored = json.loads(load("sgd_cifar10").to_json())
  stored["optimizer"]["gone"] = stored["model"]["gone"] = None
  assert config_lib.restored(stored).optimizer.name == "sgd"
  stored["optimizer"]["gone"] = 0.5
  with pytest.raises(UserError, match="optimizer.gone is no option of sgd"):
    config_lib.restored(stored)


def test_distillation_has_the_recipe_of_the_small_resmlp():
  own, config = load("resmlp_cifar", "deit"), load("distill_cifar", "soft")
  distillation = config.distillation
  assert (distillation.kind, distillation.weight, distillation.temperature) == ("soft", 0.1, 3.0)
  for group in ("model", "data", "augment", "schedule", "optimizer"):
    assert config[group].to_dict() == own[group].to_dict()
  assert (config.ema_decay, config.num_epochs) == (own.ema_decay, own.num_epochs)
  teacher = load("resnet_cifar", "resnet_56")
  optimizer = teacher.optimizer
  assert (optimizer.momentum, optimizer.learning_rate, optimizer.weight_decay) == (0.9, 0.1, 5e-4)
  assert (teacher.model.name, teacher.data.pad, teacher.data.name) == ("resnet_56", 4, "sample")
  for name in ("distill_cifar", "resnet_cifar"):
    with pytest.raises(UserError, match="takes the .* 'x'; allowed: "):
      load(name, "x")


def test_a_free_field_of_a_stored_config_that_no_file_set_can_be_set():
  config = config_lib.restored(json.loads(load("burgers").to_json()))
  assert config.model.remat is None
  config_lib.override(config, ["model.remat=True"])
  assert config.model.remat is True


def test_none_takes_a_field_back_to_the_default_of_its_name():
  config = load("darcy")
  config_lib.override(config, ["model.extractor=linear", "model.dirichlet=False"])
  with pytest.raises(UserError, match="coarse is 29, which .* does not read; allowed: its def"):
    config_lib.check(config)
  config_lib.override(config, ["model.coarse=None"])
  config_lib.check(config)
  assert config.model.coarse is None
