"""Mistakes in data and models of operators, told in one line."""

import contextlib

import numpy as np
import pytest

from mixer_jax import config as config_lib
from mixer_jax import experiment
from mixer_jax.errors import UserError
from mixer_jax.pde import generate
from mixer_jax.tasks.operator_learning.task import OperatorLearning
from tests.tasks.operator_learning.functions_on_a_circle import waves

MADE = dict(dir="", train_split="train", test_split="test")


@pytest.mark.parametrize(
  "fields, told",
  [
    (dict(step=3), "data.step=3 leaves no grid of 64 points; allowed: 1, 2, 4"),
    (
      dict(step=4, output_step=12, inverse=True),
      "data.output_step=12 leaves no grid of 64 points; allowed: 4, 8",
    ),
    (
      dict(viscosity=0.2),
      "data.viscosity is 0.2, which data.name='files' does not read; 'burgers'",
    ),
    (
      MADE | dict(name="burgers", high=5.0),
      "data.high is 5.0, which data.name='burgers' does not read",
    ),
    (
      MADE | dict(name="darcy", axes="bounded"),
      "data.axes is 'bounded', which data.name='darcy' does",
    ),
    (
      MADE | dict(name="burgers", dir="files"),
      "data.dir is 'files', which data.name='burgers' does not read; 'files' would",
    ),
    (dict(output_step=4), "data.output_step needs data.inverse=True"),
    (dict(step=4, output_step=6, inverse=True), "data.output_step is 6; allowed: a multiple of"),
    (dict(extra_test_steps="4,x"), "data.extra_test_steps is '4,x'"),
    (dict(extra_test_steps="4,04"), "data.extra_test_steps is '4,04'; allowed: different steps"),
    (dict(train_split=""), "data.train_split='': not a split"),
    (dict(name="burgers", train_split="valid"), "burgers has no split 'valid'; allowed: train"),
    (dict(train_split="absent.npz"), "absent.npz: no such file"),
    (dict(dir="/nowhere"), "/nowhere/train.npz: no such file"),
    (
      dict(train_split="train"),
      "data.name is 'files', but a split is 'train'; data.train_split and",
    ),
    (dict(validation_split="train.npz[:8]"), "shares examples of 'train.npz'"),
    (
      dict(test_split="test_2d.npz"),
      "functions of test have another number of axes: 2, those of train 1",
    ),
    (
      dict(train_split="train.npz[:8]+train_2d.npz"),
      "train_2d.npz has functions on 17x17 points, train.npz on 64; allowed: parts of a split on",
    ),
    (dict(test_split="rest.npz"), "outputs of test: function 3 is 0 at all points"),
  ],
)
def test_mistakes_in_the_data_are_one_line(config, fields, told):
  config.data.update(fields)
  with pytest.raises(UserError) as e:
    experiment.build(config)
  assert told in str(e.value) and "\n" not in str(e.value)


def test_a_test_set_that_is_trained_on_is_told(config, caplog):
  config.data.update(train_split="train.npz[:60]", test_split="train.npz[50:]")
  _ = experiment.build(config).datasets
  assert "test set test (train.npz[50:]) shares examples of 'train.npz'" in caplog.text


@pytest.mark.parametrize("offset, told", [(101325.0, True), (300.0, False)])
def test_functions_that_float32_cannot_hold_are_told(config, tmp_path, caplog, offset, told):
  u = offset + 1e-2 * np.float64(waves(0, 16, 64)[0])
  for name in ("train", "test"):
    np.savez(tmp_path / f"{name}.npz", a=u, u=np.full_like(u, 0.1))
  config.data.dir = str(tmp_path)
  experiment.build(config)
  found = [text for text in caplog.messages if "subtract their mean" in text]
  assert [text[:40] for text in found] == (
    ["inputs of train.npz: float32 rounds by u", "inputs of test.npz: float32 rounds by up"]
    if told
    else []
  )


@pytest.mark.parametrize("normalise", ["none", "global", "pointwise"])
@pytest.mark.parametrize("edge, refused", [("0", False), ("same", False), ("varies", True)])
def test_a_boundary_of_zeros_is_refused_where_outputs_vary(
  config, tmp_path, normalise, edge, refused
):
  rng = np.random.default_rng(0)
  functions = {name: rng.normal(size=(16, 9, 9)).astype(np.float32) for name in ("coeff", "sol")}
  if edge != "varies":
    for axis in (1, 2):
      ends = np.moveaxis(functions["sol"], axis, 0)
      ends[0] = ends[-1] = 0 if edge == "0" else 3
    refused = normalise == "global" or (normalise == "none" and edge == "same")
  np.savez(tmp_path / "f.npz", **functions)
  config.normalise = normalise
  config.data.update(dir=str(tmp_path), train_split="f.npz[:12]", test_split="f.npz[12:]", step=1)
  config.model = config_lib.default("operator_learning", "fno_2d").model
  config.model.update(hidden_dim=4, modes=2, num_blocks=1, dirichlet=True)
  told = "model.dirichlet=True keeps outputs at .* on the boundary"
  with pytest.raises(UserError, match=told) if refused else contextlib.nullcontext():
    _ = experiment.build(config).variable_shapes


def test_too_many_modes_are_one_line(config):
  config.model.modes = 40
  told = "model.modes is 40, which needs a grid of 78 points; .* the grid is that of data.step=2"
  with pytest.raises(UserError, match=told):
    _ = experiment.build(config).variable_shapes


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("model, axes", [("fno_2d", 1), ("galerkin_1d", 2), ("gmlp_operator", 0)])
def test_a_model_for_other_axes_is_refused(config, model, axes, made, monkeypatch):
  """Before functions are made, and of files when they have been read."""
  config.model = config_lib.default("operator_learning", model).model
  two = axes == 2
  if made:
    config.data.update(MADE | dict(name="darcy" if two else "burgers", step=1))
    monkeypatch.setattr(generate, "load", None)
  elif two:
    config.data.update(train_split="train_2d.npz", test_split="test_2d.npz", step=1)
  told = (
    "'fno_2d', for functions of 2 axes, but those of the data have 1 axis; allowed: galerkin_1d"
  )
  if two:
    told = "'galerkin_1d', for functions of 1 axis, but .* have 2 axes; allowed: galerkin_2d, gal"
  refused = pytest.raises(UserError, match=f"^model.name is {told}.*, mixer_operator")
  with refused if axes else contextlib.nullcontext():
    run = experiment.build(config) if not made else OperatorLearning.check(config)
    _ = made or run.task.model


@pytest.mark.parametrize(
  "model, fields, told",
  [
    ("fno_2d", {}, "model.padding is 9, for domains with ends, but the axes of the data are peri"),
    (
      "galerkin_2d",
      dict(coarse=8, modes=4, dirichlet=False),
      "model.extractor is 'cnn', .* allowed: 'lin",
    ),
    ("galerkin_2d", dict(coarse=8, modes=4), "model.dirichlet is True, .* allowed: False"),
  ],
)
def test_a_model_for_domains_with_ends_is_refused_on_periodic_axes(config, model, fields, told):
  config.model = config_lib.default("operator_learning", model).model
  config.model.update(fields)
  config.data.update(train_split="train_2d.npz", test_split="test_2d.npz", step=1, axes="periodic")
  with pytest.raises(UserError, match=told):
    _ = experiment.build(config).task.model


@pytest.mark.parametrize(
  "name, fields, told",
  [
    ("burgers", dict(points=12), "data.points is 12; allowed: 16 to 65536"),
    ("darcy", dict(step=11), "data.step=11 leaves no grid of 421 points; allowed: 1, 2, 3, 4, 5"),
    ("darcy", dict(step=5, extra_test_steps="4,13"), "data.extra_test_steps=13 leaves no grid of"),
    ("darcy", dict(step=5, inverse=True, output_step=25), "output_step=25 .* allowed: 5, 10, 15"),
    ("darcy", dict(step=35), "model.modes is 12, which needs a grid of 24x22 points; it has 13x13"),
    ("burgers", dict(step=512), "model.modes is 12, which needs a grid of 22 points; it has 16"),
  ],
)
def test_grids_of_generated_functions_are_checked_before_they_are_made(config, name, fields, told):
  config.model = config_lib.default("operator_learning", f"fno_{1 + (name == 'darcy')}d").model
  config.model.modes = 12
  if name == "darcy":
    config.model.padding = 0
  config.data.update(MADE | dict(name=name) | fields)
  with pytest.raises(UserError, match=told):
    OperatorLearning.check(config)


def test_a_grid_that_the_model_cannot_take_is_told_before_training(config):
  config.model = config_lib.default("operator_learning", "mixer_operator").model
  config.model.update(hidden_dim=8, num_blocks=1, modes=4)
  config.data.extra_test_steps = "4"
  told = r"cannot take the grid of test_16 .data.extra_test_steps.: trained on 32 points, called with 16; allowed: 32"
  with pytest.raises(UserError, match=told):
    _ = experiment.build(config).variable_shapes
