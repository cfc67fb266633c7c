"""The loop end to end: learning, resuming, evaluating, refusals."""

import json
import re
import types

import jax
import numpy as np
import pytest

import mixer_jax
from mixer_jax import config as config_lib
from mixer_jax import evaluate, experiment, predict
from mixer_jax.errors import Diverged, UserError
from mixer_jax.rundir import directory, metrics_file
from mixer_jax.tasks import Metric
from mixer_jax.training import loop, restore, summary
from mixer_jax.training.state import init_state
from mixer_jax.training.step import make_train_steps
from mixer_jax.training.trainer import Trainer
from tests import children
from tests.conftest import optimizer_of, waves

SLOW = [
  pytest.param(name, marks=pytest.mark.slow)
  for name in ("kfac", "graft", "kfac_adam", "kfac_muon", "soap", "shampoo")
]


@pytest.mark.parametrize("name", ["adam", *SLOW])
def test_a_mixer_learns_resumes_and_is_evaluated(name, tiny_config, tmp_path):
  config = tiny_config
  config.optimizer = optimizer_of(name)
  config.num_epochs, config.model.num_blocks = 6, 1
  whole = loop.train(config, str(tmp_path / "whole"))
  rows = metrics_file.read(whole)
  assert [(row["step"], row["epoch"]) for row in rows] == [(8 * e, e) for e in range(1, 7)]
  assert rows[-1]["train/loss"] < 0.7 * rows[0]["train/loss"]
  assert rows[-1]["test/best_top1"] > 0.6  # chance is 0.25

  # The same run, killed after two epochs: what it left behind, then a restart.
  parts = tmp_path / "parts"
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(loop, "Trainer", KilledAtSixteen)
    with pytest.raises(KeyboardInterrupt):
      loop.train(config, str(parts))
  assert len(metrics_file.read(parts)) == 2
  loop.train(config, str(parts))
  children.assert_same_run(config, parts, whole)

  for which, row in (("latest", rows[-1]), ("best", rows[rows[-1]["test/best_step"] // 8 - 1])):
    found = evaluate.evaluate(str(whole), which)
    assert found == {"test": {k: row[f"test/{k}"] for k in ("loss", "top1", "balanced_accuracy")}}
  found = mixer_jax.load_run(whole, "best")
  assert len(found.class_names) == 4
  images = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype(np.float32)
  best = restore.restore(str(whole), "best")
  np.testing.assert_array_equal(
    found.model.apply(found.variables, images), best.run.task.model.apply(best.variables, images)
  )
  for made in ("parameters.txt", "config.json", "metrics.jsonl", "run.json"):
    assert (whole / made).stat().st_size > 100
  assert list((whole / "tensorboard").iterdir())


class KilledAtSixteen(Trainer):
  def advance(self, stop):
    if self.step == 16:
      raise KeyboardInterrupt
    super().advance(stop)


@pytest.mark.parametrize(
  "name, epochs, told", [("cosine", (1.0,), True), ("step", (), True), ("step", (1.0,), False)]
)
def test_epochs_that_a_schedule_does_not_read_are_told(name, epochs, told, tmp_path, capsys):
  config = waves("sgd", num_steps=1, eval_steps=1)
  config.schedule.update(name=name, epochs=epochs)
  loop.train(config, str(tmp_path))
  said = capsys.readouterr().out
  assert ("falls at epochs where both are given, name=step" in said) == told
  assert ("[1.0] lie beyond the run's 0.125 epochs: no effect" in said) == (
    name == "step" and not told
  )


def test_a_finished_run_says_so_and_another_config_is_refused_by_its_differences(tmp_path, capsys):
  config = waves()
  loop.train(config, str(tmp_path))
  before = (tmp_path / "metrics.jsonl").read_bytes()
  lines = capsys.readouterr().out.splitlines()
  assert "backend cpu: 8 x cpu" in lines[0] and len(lines) <= 8  # tables go into a file
  loop.train(config, str(tmp_path))
  said = capsys.readouterr().out
  assert "done: 16 steps, 2 epochs, test error" in said
  assert said.endswith("; the test set has 64 examples\n")
  assert (tmp_path / "metrics.jsonl").read_bytes() == before
  config.optimizer.learning_rate = 0.5
  with pytest.raises(UserError, match=r"optimizer.learning_rate was 0.1, is 0.5\."):
    loop.train(config, str(tmp_path))
  config.batch_size = config.data.examples + 1  # which no run can use
  with pytest.raises(UserError, match="batch_size was 32, is 257; optimizer.learning_rate was"):
    loop.train(config, str(tmp_path))

  row = json.loads(before.splitlines()[-1])
  found = evaluate.evaluate(str(tmp_path), overrides=["eval_batch_size=7"])
  assert evaluate.evaluate(str(tmp_path), 16, overrides="eval_batch_size=7") == found
  assert found["test"]["error"] == pytest.approx(row["test/error"], rel=1e-6)
  with pytest.raises(UserError, match="--set is 'seed=1'; allowed: .*eval_batch_size, "):
    evaluate.evaluate(str(tmp_path), overrides=["seed=1"])
  with pytest.raises(UserError, match="eval_batch_size is 0; allowed: 1 or more"):
    evaluate.evaluate(str(tmp_path), overrides=["eval_batch_size=0"])


def test_other_data_are_refused(tmp_path):
  config = waves()
  loop.train(config, str(tmp_path))
  record = tmp_path / "run.json"
  record.write_text(record.read_text().replace('"train": 256', '"train": 255'))
  kept, config.eval_batch_size = (tmp_path / "config.json").read_text(), 16
  with pytest.raises(UserError, match="trained on other data: 255 examples, now 256"):
    loop.train(config, str(tmp_path))
  assert (tmp_path / "config.json").read_text() == kept


def test_a_directory_of_somebody_else_is_refused(tmp_path):
  foreign, begun = tmp_path / "foreign", tmp_path / "begun"
  for path in (foreign, begun):
    (path / "lost+found").mkdir(parents=True)
  (foreign / "thesis.tex").write_text("")
  with pytest.raises(UserError, match="foreign holds 'thesis.tex' and no run; take an empty"):
    directory.create(str(foreign))
  assert sorted(p.name for p in foreign.iterdir()) == ["lost+found", "thesis.tex"]
  # The first start ended before its config was written.
  (begun / "checkpoints").mkdir()
  for name in ("lock", "log.txt", ".hidden"):
    (begun / name).write_text("")
  assert directory.create(str(begun)) == begun
  (foreign / "config.json").write_text("{}")
  assert directory.create(str(foreign)) == foreign
  (begun / "study.json").write_text("{}")
  with pytest.raises(UserError, match="begun holds 'study.json' and no run"):
    directory.create(str(begun))
  assert directory.create(str(begun), directory.STUDY) == begun


def test_a_run_without_a_directory_makes_the_same_steps(tmp_path):
  config = waves()
  path = loop.train(config, str(tmp_path))
  states, rows = zip(*loop.evaluations(experiment.build(config)))
  shared = [{k: v for k, v in row.items() if k not in children.TIMES} for row in rows]
  assert shared == children.rows(path)
  assert {"step", "epoch", "train/error", "test/error", "learning_rate"} <= shared[0].keys()
  run, variables, step = restore.restore(str(path))
  assert step == 16
  jax.tree.map(np.testing.assert_array_equal, variables["params"], states[-1].params)
  outputs, targets, weights, _ = predict.predict(run, variables)
  split = run.datasets["test"].tree
  np.testing.assert_array_equal(weights, split["mask"])
  np.testing.assert_array_equal(targets, split["y"])
  errors = np.sum(split["mask"] * np.square(outputs - targets)) / np.sum(split["mask"])
  assert np.sqrt(errors) == pytest.approx(rows[-1]["test/error"], rel=1e-5)


def test_the_summary_headlines_the_last_step_and_says_when_a_target_was_reached():
  top1, error = Metric("top1", True, percent=True), Metric("error", False)
  rows = [
    {"step": 10 * e, "epoch": e, "test/top1": v, "test/best_top1": 0.5, "test/best_step": 20}
    for e, v in enumerate((0.2, 0.5, 0.4), start=1)
  ]
  text = summary.of_run(rows, top1, "test", 0.45)
  last, best = text.index("test top1 40.00%"), text.index("best test top1 50.00% at step 20")
  assert text.startswith("30 steps, 3 epochs, ") and last < best
  assert text.endswith("target 45.00% at step 20")
  assert summary.of_run(rows, top1, "test", 0.6).endswith("target 60.00% not reached")
  rows = [{"step": 5, "epoch": 1, "test/error": 0.3, "test/best_error": 0.3, "test/best_step": 5}]
  # Lower is better.
  assert summary.of_run(rows, error, "test", 0.3).endswith("target 0.3 at step 5")
  assert summary.of_run(rows, error, "test", 0.2).endswith("target 0.2 not reached")


def test_a_last_step_that_diverges_saves_nothing(tmp_path):
  """Loss and parameters are still finite then: only the outputs of the parameters are not."""
  config = waves(**{"num_steps": 1, "optimizer.learning_rate": 1e30, "optimizer.momentum": 0.0})
  message = (
    r"the test error of step 1 is not finite \(learning_rate=1e\+30\); nothing was evaluated"
    r" before; last good checkpoint: none. Try a lower learning_rate"
  )
  with pytest.raises(Diverged, match=message):
    loop.train(config, str(tmp_path))
  assert not metrics_file.read(tmp_path)
  # Nothing was saved, so the advice can be followed in the same directory.
  config.optimizer.learning_rate = 0.1
  loop.train(config, str(tmp_path))
  assert len(metrics_file.read(tmp_path)) == 1


@pytest.mark.thorough
def test_a_run_may_move_and_be_evaluated_elsewhere(tmp_path):
  path = loop.train(waves(), str(tmp_path))
  stored = json.loads((path / "config.json").read_text())
  stored |= {"require_accelerator": True, "eval_batch_size": 30, "num_epochs": 10**9}
  # Of more devices, and of a number that does not divide those here.
  for mesh in (dict(data=64, model=1), dict(data=-1, model=3)):
    (path / "config.json").write_text(json.dumps(stored | {"mesh": mesh}))
    found = evaluate.evaluate(str(path))["test"]["error"]
    assert found == pytest.approx(metrics_file.read(path)[-1]["test/error"], rel=1e-6)


def test_a_finished_run_needs_no_training_set_that_fits():
  """With the notes of its first start it is built on the data that are there."""
  config = waves(batch_size=4096)
  with pytest.raises(UserError, match="batch_size is 4096, more than the .* training examples"):
    experiment.build(config)
  experiment.make(config, notes={})


@pytest.mark.thorough
def test_the_table_of_blocks_follows_the_options(tiny_config):
  for norms in ("gradient", "diagonal"):
    tiny_config.optimizer = config_lib.optimizer("kfac", learning_rate=0.1, norms=norms)
    line, tables = summary.of_model(experiment.build(tiny_config))
    assert "\n" not in line and "curvature blocks: " in line and norms in line
    lines = tables.splitlines()
    assert [x.split()[1] for x in lines if x.startswith("MixerBlock_0/LayerNorm_0/scale ")] == [
      norms
    ]


def test_the_table_of_blocks_marks_diagonal_factors(tiny_config):
  def factors(max_factor):
    tiny_config.optimizer = config_lib.optimizer("kfac", learning_rate=0.1, max_factor=max_factor)
    table = summary.of_model(experiment.build(tiny_config))[1].split("curvature block")[1]
    return re.findall(r"(\d+)( \(diagonal\))?(?= x |$)", table, re.MULTILINE)

  assert {mark for _, mark in factors(None)} == {""}
  found = {(int(size) > 16, bool(mark)) for size, mark in factors(16)}
  assert found == {(True, True), (False, False)}


@pytest.mark.thorough
def test_devices_share_the_work():
  """Results alone would be equal, too, if every device did everything."""

  def flops(devices):
    run = experiment.build(waves(**{"mesh.data": devices, "model.width": 64}))
    args = (init_state(run), run.datasets["train"].tree, np.zeros((1, 32), np.int32))
    return make_train_steps(run).lower(*args).compile().cost_analysis()["flops"]

  assert flops(8) < 0.25 * flops(1)


@pytest.mark.thorough
def test_inputs_are_resized_in_the_step(tiny_config):
  tiny_config.data.update(resize=24, image_size=20, random_crop=True)
  tiny_config.num_steps, tiny_config.model.num_blocks = 1, 1
  [(state, row)] = loop.evaluations(experiment.build(tiny_config))
  assert np.isfinite(row["train/loss"])
  # Five by five patches of 4 pixels: the token-mixing layers see 25 tokens.
  assert state.params["MixerBlock_0"]["token_mixing"]["Dense_0"]["kernel"].shape[0] == 25


def test_a_run_that_shall_be_deterministic_refuses_a_gpu_without_the_flag(monkeypatch):
  config, device = waves(deterministic=True), types.SimpleNamespace(platform="gpu")
  experiment.check_accelerator(config)  # on a CPU
  monkeypatch.setattr(jax, "devices", lambda: [device])
  flag = "--xla_gpu_deterministic_ops"
  for given in (f"{flag}=false", f"{flag}=true {flag}=false"):
    monkeypatch.setenv("XLA_FLAGS", given)
    with pytest.raises(UserError, match="XLA_FLAGS lack --xla_gpu_deterministic_ops=true"):
      experiment.check_accelerator(config)
  monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_gpu_deterministic_ops=true")
  experiment.check_accelerator(config)


@pytest.mark.parametrize(
  "field, value, message",
  [
    (
      "task",
      "segments",
      "task is 'segments'; allowed: image_classification, distillation, .*, physics or module.path",
    ),
    ("batch_size", 33, "batch_size is 33; it must be a positive multiple of 8 .*, or mesh.data=3 "),
    ("batch_size", 512, "batch_size is 512, more than the 256 training examples"),
    ("mesh.data", 9, "mesh.data is 9; allowed: -1 for all, or 1 to 8 devices"),
    ("mesh.model", 2, "mesh.data is 8; allowed: -1 for all, or 1 to 4 devices of 2 .mesh.model"),
    ("schedule.warmup_epochs", 2.0, "warmup_epochs is 2.0; it must be below the run.s length, 2"),
    ("schedule.warmup_steps", 16, "warmup_steps is 16; it must be below the run.s length, 16"),
    ("require_accelerator", True, "require_accelerator is True, but JAX finds only a CPU"),
  ],
)
def test_config_mistakes_are_named_before_a_directory_is_made(field, value, message, tmp_path):
  config = waves(**{"mesh.data": 8})
  with config.ignore_type():
    config.update_from_flattened_dict({field: value})
  with pytest.raises(UserError, match=message):
    loop.train(config, str(tmp_path / "run"))
  assert not (tmp_path / "run").exists()
