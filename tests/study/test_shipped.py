"""The studies of `configs/studies`: their runs, settings and published values."""

import itertools
import json
import math
import pathlib

import numpy as np
import pytest

from mixer_jax.study import Published, plan, record

ROOT = pathlib.Path(__file__).parent.parent.parent
STUDIES = ROOT / "configs" / "studies"
NAMES = sorted(path.stem for path in STUDIES.glob("*.py"))


def shipped(name):
  return plan.load(str(STUDIES / f"{name}.py"))


def as_json(config):
  return json.loads(config.to_json())


_LARGE = ("frontier", "physics")


@pytest.mark.parametrize(
  "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in _LARGE)) for n in NAMES]
)
@pytest.mark.first(3)
def test_shipped_studies_expand_to_usable_runs(name, tmp_path):
  study = shipped(name)
  opened = record.open_study(tmp_path, study, str(STUDIES / f"{name}.py"), [])  # checks configs
  names = [run.name for run in opened.runs]
  assert len(names) == len(set(names))
  for run in opened.runs:
    config = opened.config(run)
    assert config.seed == run.seed
    assert as_json(config) == as_json(study.run_config(run.name))
  distinct = {(run.tunes, json.dumps(as_json(opened.config(run)))) for run in opened.runs}
  assert len(distinct) == len(names)


def test_settings_of_the_paper_s_section_4_3():
  for dataset in ("cifar10", "cifar100"):
    study = shipped(f"{dataset}_optimizers")
    for run in study.runs():
      config = study.run_config(run.name)
      model, optimizer = run.cell
      assert config.optimizer.learning_rate == {"sgd": 1e-2, "adam": 1e-3, "kfac": 1e-3}[optimizer]
      assert config.optimizer.weight_decay == 1e-4
      assert (config.num_epochs, config.batch_size, config.data.name) == (100, 64, dataset)
      assert config.data.image_size == (224 if "16" in model else 32)
      assert bool(config.pretrained) == (model == "b16_pt")
  study = shipped("cifar10_grafting")
  for run in study.runs():
    optimizer = study.run_config(run.name).optimizer
    sides = (optimizer.magnitude, optimizer.direction)
    assert "_".join(side.name for side in sides) == run.cell[1]
    assert all(side.learning_rate == {"sgd": 1e-2, "kfac": 1e-3}[side.name] for side in sides)


# The lines of the paper's tables as its PDF has them: top-1 of SGD, Adam and K-FAC,
# then their epochs to the target.
PRINTED = {
  "cifar10_optimizers": """
    S/4 83.22 80.88 82.42 38 43 35
    B/4 82.73 80.9 82.81 40 42 40
    S/16 74.64 71.99 80.44 11 15 3
    B/16 72.68 67.09 79.02 6 10 2
    B/16-PT 96.73 72.24 91.00 0 - 40""",
  "cifar100_optimizers": """
    B/4 53.67 48.04 60.59 10 11 3
    B/16 47.65 42.71 54.96 6 7 3
    B/16-PT 83.49 45.37 70.81 0 - 41""",
}
PRINTED_GRAFTING = """
  S/16 74.64 75.47 80.45 80.44
  B/16 72.68 75.44 78.86 79.02
  B/16-PT 96.73 95.92 90.75 91.00"""


def printed(text):
  for line in text.strip().splitlines():
    model, *figures = line.split()
    yield model.lower().replace("/", "").replace("-", "_"), figures


@pytest.mark.parametrize("name", PRINTED)
def test_published_values_are_as_printed(name):
  expected = {
    (model, optimizer): Published(float(top1), None if epochs == "-" else int(epochs))
    for model, figures in printed(PRINTED[name])
    for optimizer, top1, epochs in zip(("sgd", "adam", "kfac"), figures[:3], figures[3:])
  }
  assert shipped(name).published == expected


def test_published_values_of_grafting_are_as_printed():
  pairs = ("sgd_sgd", "sgd_kfac", "kfac_sgd", "kfac_kfac")
  expected = {
    (model, pair): Published(float(top1))
    for model, figures in printed(PRINTED_GRAFTING)
    for pair, top1 in zip(pairs, figures)
  }
  assert shipped("cifar10_grafting").published == expected


def test_published_values_agree_with_the_paper_s_text():
  """Sentences of Sections 5.1 to 5.3 about its tables."""
  cifar10, cifar100 = shipped("cifar10_optimizers"), shipped("cifar100_optimizers")
  values = lambda study: {cell: p.value for cell, p in study.published.items()}
  two, three, four = values(cifar10), values(cifar100), values(shipped("cifar10_grafting"))
  for model in ("s16", "b16"):  # K-FAC best, then SGD, then Adam
    assert two[model, "kfac"] > two[model, "sgd"] > two[model, "adam"]
  for model in ("b4", "b16"):
    assert three[model, "kfac"] > max(three[model, "sgd"], three[model, "adam"])
  for table, study in ((two, cifar10), (three, cifar100)):  # SGD wins with pre-training, at once
    assert table["b16_pt", "sgd"] > table["b16_pt", "kfac"] > table["b16_pt", "adam"]
    assert study.published["b16_pt", "sgd"].epochs_to_target == 0
    assert study.published["b16_pt", "adam"].epochs_to_target is None
    targets = {cell: 100 * study.run_config(f"{'-'.join(cell)}-seed0").target for cell in table}
    for cell, figure in study.published.items():  # a target was reached, or it was not
      assert (figure.value >= targets[cell]) == (figure.epochs_to_target is not None)
  for model in ("s16", "b16", "b16_pt"):
    for one in ("sgd", "kfac"):  # grafting (A, A) is A; rows differ little, columns more
      assert four[model, f"{one}_{one}"] == two[model, one]
    within = [abs(four[model, f"{m}_sgd"] - four[model, f"{m}_kfac"]) for m in ("sgd", "kfac")]
    between = [abs(four[model, f"sgd_{d}"] - four[model, f"kfac_{d}"]) for d in ("sgd", "kfac")]
    assert max(within) < min(between)


def test_tuning_has_equal_budgets_apart_from_the_test_set():
  study = shipped("tuned")
  assert {len(tried) for tried in study.tuning.candidates.values()} == {8}
  for optimizer, lowest in {"sgd": 1e-2, "adam": 1e-4, "kfac": 2e-3}.items():
    rates = [c["optimizer.learning_rate"] for c in study.tuning.candidates[optimizer]]
    decades = [math.log10(rate / lowest) for rate in rates]
    assert [int(4 * d) for d in decades] == list(range(8))  # one in each eighth of two decades
  for run in study.runs():
    data = study.run_config(run.name).data
    splits = dict(train_split=data.train_split, test_split=data.test_split)
    held_out = dict(train_split="train[:90%]", test_split="train[90%:]")
    assert splits == (held_out if run.tunes else dict(train_split="train", test_split="test"))


def test_autoencoders_are_compared_by_their_training_loss_at_equal_budgets():
  study = shipped("autoencoder")
  assert {len(tried) for tried in study.tuning.candidates.values()} == {8}
  for optimizer, tried in study.tuning.candidates.items():
    rates = np.sort(np.log10([settings["optimizer.learning_rate"] for settings in tried]))
    np.testing.assert_allclose(np.diff(rates), np.ptp(rates) / 7, atol=0.02)  # one of each eighth
    evaluated = {"sample": 100, "cifar10": 20, "mnist": 20}.items()
    for (data, evaluations), batch in itertools.product(evaluated, ("b100", "b500")):
      names = [f"tune-{data}-{batch}-{optimizer}-0", f"{data}-{batch}-{optimizer}-seed0"]
      trial, last = (study.run_config(name) for name in names)
      assert (trial.data.train_split, trial.data.test_split) == ("train", "train")
      assert (last.data.train_split, last.data.test_split) == ("train", "test")
      assert trial.num_epochs == last.num_epochs == pytest.approx(evaluations * last.eval_epochs)
      assert trial.eval_epochs >= trial.num_epochs  # once, at the end
      images = {"sample": 5_000, "cifar10": 50_000, "mnist": 60_000}[data]
      assert last.num_epochs * images % (last.batch_size * evaluations) == 0  # equal intervals
      assert last.batch_size == int(batch[1:])
      warmup_steps = last.schedule.warmup_epochs * images / last.batch_size
      assert warmup_steps == pytest.approx(images / 1000)  # with either batch
      if optimizer.startswith("kfac"):
        sampled = last.batch_size * (last.optimizer.factor_fraction or 1)
        assert sampled == {"b100": 100, "b500": 125}[batch]


def test_the_study_of_the_docs_expands_as_its_head_says():
  path = ROOT / "docs" / "own_study.py"
  runs = plan.load(str(path)).planned([])
  assert "44 runs" in path.read_text() and len(runs) == 44
  tries = [run for run in runs if run.tunes]
  assert [run.name for run in tries[:2]] == ["tune-narrow-adam-0", "tune-narrow-adam-1"]
  assert len(tries) == 2 * 2 * 8 and runs[-1].name == "wide-kfac_muon-seed2"
  widths = {(run.cell[0], run.config["model"]["hidden_dim"]) for run in runs}
  assert widths == {("narrow", 64), ("wide", 256)}
