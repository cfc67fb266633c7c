"""The loop end to end: learning, resuming, evaluating, devices, refusals."""

import json

import jax
import numpy as np
import pytest

from mixer_jax import (
  checkpoint,
  evaluate,
  experiment,
  sharding,
  train,
  workdir,
)
from mixer_jax import (
  config as config_lib,
)
from mixer_jax.errors import Diverged, UserError
from mixer_jax.report import console

OPTIMIZERS = {
  "sgd": dict(learning_rate=0.1),
  "adam": dict(learning_rate=1e-2),
  "kfac": dict(learning_rate=0.05, factor_period=2, inverse_period=4, factor_decay=0.5),
}
TIMES = ("images_per_second", "seconds_per_epoch")


def with_optimizer(config, name):
  if name == "graft":
    sides = (config_lib.optimizer(side, **OPTIMIZERS[side]) for side in ("sgd", "kfac"))
    config.optimizer = config_lib.grafted(*sides)
  else:
    config.optimizer = config_lib.optimizer(name, **OPTIMIZERS[name])
  return config


def rows_without_times(path):
  return [{k: v for k, v in row.items() if k not in TIMES} for row in workdir.read_metrics(path)]


def final_state(config, path):
  run = experiment.build(config)
  saved = checkpoint.Checkpoints(path, read_only=True)
  shapes = jax.eval_shape(lambda: train.init_state(run))
  shapes = checkpoint.template(shapes, sharding.replicated(run.mesh))
  return saved.restore(saved.find("latest"), shapes.params, train._without_params(shapes))


@pytest.mark.parametrize(
  "name",
  [
    "kfac",
    "graft",
    *(pytest.param(name, marks=pytest.mark.slow) for name in OPTIMIZERS if name != "kfac"),
  ],
)
def test_learns_resumes_and_evaluates(name, tiny_config, tmp_path):
  config = with_optimizer(tiny_config, name)
  config.num_epochs = 6
  whole = train.train(config, str(tmp_path / "whole"))
  rows = workdir.read_metrics(whole)
  assert [row["epoch"] for row in rows] == [1, 2, 3, 4, 5, 6]
  assert rows[-1]["train/loss"] < 0.7 * rows[0]["train/loss"]
  assert rows[-1]["test/best_top1"] > 0.6  # chance is 0.25

  # The same run, killed after two epochs: what it left behind, then a restart.
  parts = tmp_path / "parts"
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(train, "EpochTrainer", KilledInThird)
    with pytest.raises(KeyboardInterrupt):
      train.train(config, str(parts))
  assert len(workdir.read_metrics(parts)) == 2
  train.train(config, str(parts))
  assert rows_without_times(parts) == rows_without_times(whole)
  same = jax.tree.map(np.array_equal, final_state(config, parts), final_state(config, whole))
  assert all(jax.tree.leaves(same))

  for which, row in (("latest", rows[-1]), ("best", rows[rows[-1]["test/best_epoch"] - 1])):
    metrics = evaluate.evaluate(str(whole), which)
    assert metrics["top1"] == row["test/top1"]
    assert metrics["loss"] == row["test/loss"]
  for made in ("curves.png", "config.json", "metrics.jsonl"):
    assert (whole / made).stat().st_size > 100
  assert list((whole / "tensorboard").iterdir())


class KilledInThird(train.EpochTrainer):
  def __call__(self, state, epoch, *args):
    if epoch == 3:
      raise KeyboardInterrupt
    return super().__call__(state, epoch, *args)


def test_a_finished_run_says_so(tiny_config, tmp_path, capsys):
  train.train(tiny_config, str(tmp_path))
  before = (tmp_path / "metrics.jsonl").read_bytes()
  capsys.readouterr()
  train.train(tiny_config, str(tmp_path))
  assert "finished already: 2 epochs" in capsys.readouterr().out
  assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_another_config_is_refused_by_its_differences(tiny_config, tmp_path):
  train.train(tiny_config, str(tmp_path))
  tiny_config.optimizer.learning_rate = 0.5
  with pytest.raises(UserError, match=r"optimizer.learning_rate was 0.003, is 0.5\."):
    train.train(tiny_config, str(tmp_path))


def one_epoch(config):
  """Parameters and metrics after an epoch, without a directory."""
  run = experiment.build(config)
  state = jax.device_put(train.init_state(run), sharding.replicated(run.mesh))
  state, metrics, _ = train.EpochTrainer(run)(state, 1)
  return state, metrics


def assert_same_run(a, b, rtol, atol):
  (a, a_metrics), (b, b_metrics) = a, b
  assert int(a.step) == int(b.step)
  close = lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol)
  jax.tree.map(close, a.params, b.params)
  close(a_metrics["loss"], b_metrics["loss"])


def test_accumulation_equals_one_batch(tiny_config):
  config = with_optimizer(tiny_config, "sgd")
  one = one_epoch(config)
  config.accum_steps = 4
  assert_same_run(one_epoch(config), one, rtol=1e-4, atol=1e-5)


def test_a_streamed_set_makes_the_steps_of_a_resident_one(tiny_config, monkeypatch):
  config = with_optimizer(tiny_config, "sgd")
  resident = one_epoch(config)
  monkeypatch.setattr("mixer_jax.data.batches.DEVICE_BYTES", 0)
  config.steps_per_dispatch = 4
  assert_same_run(one_epoch(config), resident, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("random_crop", [False, True])
def test_large_inputs_are_resized_in_the_step(random_crop, tiny_config):
  config = with_optimizer(tiny_config, "sgd")
  config.data.update(resize=24, image_size=20, random_crop=random_crop)
  state, metrics = one_epoch(config)
  assert np.isfinite(metrics["loss"])
  # Five by five patches of 4 pixels: the token-mixing layers see 25 tokens.
  assert state.params["MixerBlock_0"]["token_mixing"]["Dense_0"]["kernel"].shape[0] == 25


@pytest.mark.parametrize("batch_size", [8, 32, 88, 96])
@pytest.mark.parametrize("devices", [1, 8])
def test_evaluation_counts_each_image_once(batch_size, devices, tiny_config):
  tiny_config.eval_batch_size = batch_size
  tiny_config.mesh.data = devices
  run = experiment.build(tiny_config)
  params = jax.tree.map(lambda x: x + 0.05, run.task.init(jax.random.key(0)))
  metrics = evaluate.Evaluator(run)(params)
  # All 90 images at once, by NumPy.
  split = run.dataset.test
  batch = run.task.batch(None, split.images, split.labels, train=False)
  logits = np.float64(run.task.predict(params, batch)[0])
  log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
  assert metrics["top1"] == pytest.approx(np.mean(logits.argmax(1) == split.labels), abs=1e-7)
  assert metrics["loss"] == pytest.approx(-log_p[np.arange(90), split.labels].mean(), rel=1e-5)
  assert metrics["top5"] == 1.0  # there are four classes


def test_one_seed_is_one_run(tiny_config):
  config = with_optimizer(tiny_config, "kfac")
  (a, _), (b, _) = one_epoch(config), one_epoch(config)
  assert all(jax.tree.leaves(jax.tree.map(np.array_equal, a, b)))
  config.seed = 1
  c, _ = one_epoch(config)
  assert not np.array_equal(a.params["stem"]["kernel"], c.params["stem"]["kernel"])


def test_the_target_epoch_is_the_first_that_reaches_it():
  progress = checkpoint.Progress()
  for epoch, top1 in enumerate((0.2, 0.5, 0.4, 0.5, 0.6), start=1):
    progress = progress.after(epoch, top1, target=0.45)
  assert progress == checkpoint.Progress(epoch=5, best_top1=0.6, best_epoch=5, target_epoch=2)
  assert checkpoint.Progress().after(1, 0.9, target=0.0).target_epoch == 0


def test_rows_after_the_last_checkpoint_are_dropped(tmp_path):
  rest = dict.fromkeys(workdir.COLUMNS, 0.0)
  rows = [rest | {"epoch": e, "step": 10 * e, "train/loss": 1.0} for e in (1, 2, 3)]
  text = "".join(json.dumps(row) + "\n" for row in rows)
  (tmp_path / "metrics.jsonl").write_text(text + '{"epoch": 4, "st')
  writer = workdir.MetricWriter(tmp_path, epoch=2)
  writer.write(rest | {"epoch": 3, "step": 30, "train/loss": 0.5})
  writer.close()
  assert [row["train/loss"] for row in workdir.read_metrics(tmp_path)] == [1.0, 1.0, 0.5]


def test_a_last_step_that_diverges_saves_nothing(tiny_config, tmp_path):
  """Loss and parameters are still finite then: only what the parameters give is not."""
  tiny_config.num_epochs = 1
  tiny_config.data.train_split = "train[:32]"
  tiny_config.optimizer = config_lib.optimizer("sgd", learning_rate=1e38, momentum=0.0)
  message = r"the test loss of step 1 \(epoch 1\) is not finite; .* loss 1\.38.*checkpoint: none"
  with pytest.raises(Diverged, match=message):
    train.train(tiny_config, str(tmp_path))
  assert not workdir.read_metrics(tmp_path)
  # Nothing was saved, so the advice can be followed in the same directory.
  tiny_config.optimizer.learning_rate = 0.1
  train.train(tiny_config, str(tmp_path))
  assert len(workdir.read_metrics(tmp_path)) == 1


def test_a_run_may_move_and_be_evaluated_elsewhere(tiny_config, tmp_path):
  tiny_config.num_epochs = 1
  path = train.train(tiny_config, str(tmp_path))
  stored = json.loads((path / "config.json").read_text())
  stored["require_accelerator"] = True
  stored["eval_batch_size"] = 30
  [row] = workdir.read_metrics(path)
  # Of more devices, of a number that does not divide those here, and of an earlier version.
  for mesh in (dict(data=64, model=1), dict(data=-1, model=3), dict(data=-1)):
    (path / "config.json").write_text(json.dumps(stored | {"mesh": mesh}))
    metrics = evaluate.evaluate(str(path), "latest")
    assert metrics["top1"] == pytest.approx(row["test/top1"], abs=1e-6)


def test_the_table_of_blocks_follows_the_options(tiny_config, capsys):
  for norms in ("gradient", "diagonal"):
    tiny_config.optimizer = config_lib.optimizer("kfac", learning_rate=0.1, norms=norms)
    console.print_model(experiment.build(tiny_config))
    lines = capsys.readouterr().out.splitlines()
    assert [x.split()[1] for x in lines if x.startswith("MixerBlock_0/LayerNorm_0 ")] == [norms]


def test_devices_share_the_work(tiny_config):
  """Results alone would be equal, too, if every device did everything."""

  def flops(devices):
    tiny_config.mesh.data = devices
    run = experiment.build(with_optimizer(tiny_config, "sgd"))
    split = run.dataset.train
    args = (train.init_state(run), run.task.train_metrics.empty())
    args += ((split.images, split.labels), np.zeros((1, 32), np.int32))
    compiled = train.make_train_steps(run).lower(*args).compile()
    return compiled.cost_analysis()["flops"]

  assert flops(8) < 0.25 * flops(1)


def test_a_diverged_run_stops_and_names_its_last_checkpoint(tiny_config, tmp_path):
  tiny_config.optimizer = config_lib.optimizer("sgd", learning_rate=1e30)
  message = r"the (test )?(loss|update) of step \d \(epoch 1\) is not finite.*learning_rate"
  with pytest.raises(Diverged, match=message):
    train.train(tiny_config, str(tmp_path))


@pytest.mark.parametrize(
  "field, value, message",
  [
    ("seed", -1, "seed is -1; allowed: 0 or more"),
    ("accum_steps", 0, "accum_steps is 0; allowed: 1 or more"),
    ("checkpoint_epochs", 0, "checkpoint_epochs is 0; allowed: 1 or more"),
    ("steps_per_dispatch", -1, "steps_per_dispatch is -1; allowed: 0 or more"),
    ("target_accuracy", 45.0, "target_accuracy is 45.0; allowed: 0 to 1"),
    ("on_nonfinite", "ignore", "on_nonfinite is 'ignore'; allowed: stop, skip, restore"),
    ("task", "segmentation", "task is 'segmentation'; allowed: classification"),
    ("model.patch_size", 0, "model.patch_size is 0; allowed: 1 or more"),
    ("model.hidden_dim", -1, "model.hidden_dim is -1; allowed: 1 or more"),
    ("model.dtype", "int8", "model.dtype is 'int8'; allowed: float32, bfloat16"),
    ("model.gelu", "relu", "model.gelu is 'relu'; allowed: tanh, exact"),
    ("model.dropout_rate", 1.5, "model.dropout_rate is 1.5; allowed: 0 to 0.999"),
    ("optimizer.learning_rate", -1.0, "optimizer.learning_rate is -1.0; allowed: 0 or more"),
    ("batch_size", 33, "batch_size is 33; it must be a positive multiple of 8"),
    ("batch_size", 512, "batch_size is 512, more than the 256 training images"),
    ("eval_batch_size", 12, "eval_batch_size is 12; it must be a positive multiple of 8"),
    ("mesh.data", 9, "mesh.data is 9; allowed: -1 for all, or 1 to 8 devices"),
    ("mesh.model", 2, "mesh.data is 8; allowed: -1 for all, or 1 to 4 devices of 2 .mesh.model"),
    ("mesh.model", 9, "mesh.model is 9; allowed: 1 to 8 devices"),
    ("model.name", "mixer_x", "model.name is 'mixer_x'; known models: mixer_"),
    ("model.patch_size", 3, "image_size is 8; it must be a multiple of the patch size 3"),
    ("optimizer.name", "kfca", "optimizer.name is 'kfca'; allowed: sgd, adam"),
    ("optimizer.damping", 0.1, "optimizer.damping is no option of adam; it takes b1"),
    ("optimizer.decay", "some", "optimizer.decay is 'some'; allowed: all, kernels"),
    ("schedule.name", "cos", "schedule.name is 'cos'; allowed: constant, step"),
    ("schedule.warmup_epochs", 2.0, "warmup_epochs is 2.0; it must be at least 0 and below"),
    ("require_accelerator", True, "require_accelerator is True, but JAX finds only a CPU"),
  ],
)
def test_config_mistakes_are_named(field, value, message, tiny_config, tmp_path):
  tiny_config.mesh.data = 8
  tiny_config.update_from_flattened_dict({field: value})
  with pytest.raises(UserError, match=message):
    train.train(tiny_config, str(tmp_path / "run"))
  assert not (tmp_path / "run").exists()
