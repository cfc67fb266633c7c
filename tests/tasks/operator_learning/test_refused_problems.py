"""Mistakes in the data and models of operators: what is refused, and what is warned of."""

import contextlib

import numpy as np
import pytest

from mixer_jax import config as config_lib
from mixer_jax import experiment
from mixer_jax.errors import UserError
from mixer_jax.pde import generate
from mixer_jax.tasks.operator_learning.task import OperatorLearning
from mixer_jax.training import contract
from tests.tasks.operator_learning.functions_on_a_circle import waves

MADE = dict(dir="", train_split="train", test_split="test")
PERIODIC = dict(train_split="train_2d.npz", test_split="test_2d.npz", step=1, axes="periodic")


@pytest.mark.parametrize(
  "model, fields, told",
  [
    ("", dict(step=3), "step=3 .*64 points"),
    ("", dict(step=4, output_step=12, inverse=True), "output_step=12"),
    ("", dict(step=4, output_step=6, inverse=True), "data.output_step is 6"),
    ("", dict(output_step=4), "data.output_step is 4"),
    ("", dict(extra_test_steps="4,x"), "data.extra_test_steps is '4,x'"),
    ("", dict(name="burgers"), "data.dir is"),
    ("", MADE | dict(name="burgers", train_split="valid"), "burgers has no split 'valid'"),
    ("", dict(train_split="absent.npz"), "absent.npz"),
    ("", dict(validation_split="train.npz[:8]"), "shares examples of 'train.npz'"),
    ("", dict(test_split="rest.npz"), "outputs of test: function 3"),
    ("", dict(step=1, train_split="train.npz[:2]"), "batch_size"),
    ("fno_2d", {}, "model.name is 'fno_2d'"),
    ("fno_2d", PERIODIC, "model.padding is 9"),
    ("galerkin_2d", PERIODIC, "model.dirichlet is True"),
  ],
)
def test_a_mistake_names_its_field_or_file(config, model, fields, told):
  if model:
    config.model = config_lib.default("operator_learning", model).model
    config.model.update({"coarse": 8, "modes": 4} if model == "galerkin_2d" else {})
  config.data.update(fields)
  with pytest.raises(UserError, match=told) as e:
    _ = experiment.build(config).task.model
  assert "\n" not in str(e.value)


@pytest.mark.parametrize(
  "name, fields, told",
  [
    ("darcy", dict(step=11), "step=11 .*421 points"),
    ("darcy", dict(step=5, extra_test_steps="4,13"), "step=13"),
    ("darcy", dict(step=35), "model.modes is 12"),
    ("burgers", dict(step=512), "model.modes is 12"),
  ],
)
def test_grids_are_checked_before_functions_are_generated(config, name, fields, told, monkeypatch):
  monkeypatch.setattr(generate, "load", None)
  config.model = config_lib.default("operator_learning", f"fno_{1 + (name == 'darcy')}d").model
  config.model.modes = 12
  if name == "darcy":
    config.model.padding = 0
  config.data.update(MADE | dict(name=name) | fields)
  with pytest.raises(UserError, match=told):
    OperatorLearning.check(config)


@pytest.mark.parametrize("offset, told", [(101325.0, True), (300.0, False)])
def test_functions_that_float32_cannot_hold_are_told(config, tmp_path, caplog, offset, told):
  u = offset + 1e-2 * np.float64(waves(0, 16, 64)[0])
  for name in ("train", "test"):
    np.savez(tmp_path / f"{name}.npz", a=u, u=np.full_like(u, 0.1))
  config.data.dir = str(tmp_path)
  experiment.build(config)
  assert ("inputs of train.npz: float32 rounds" in caplog.text) == told
  assert "outputs of" not in caplog.text


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
  refusal = pytest.raises(UserError, match="model.dirichlet")
  with refusal if refused else contextlib.nullcontext():
    _ = experiment.build(config).variable_shapes


def test_a_grid_that_the_model_cannot_take_is_told_before_training(config):
  config.model = config_lib.default("operator_learning", "mixer_operator").model
  config.model.update(hidden_dim=8, num_blocks=1, modes=4)
  config.data.extra_test_steps = "4"
  with pytest.raises(UserError, match=r"mixer_operator on the grid \(16,\)"):
    contract.check_task(experiment.build(config))
