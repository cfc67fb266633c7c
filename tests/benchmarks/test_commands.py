"""The commands: the jobs that they make of their flags, and their refusals."""

import os
import pathlib
import subprocess
import sys
import types

import pytest

from benchmarks import compile as compile_benchmark
from benchmarks import (
  configs,
  inference,
  operator_peers,
  optimizers,
  peers,
  physics_peers,
  steps,
  tables,
  text_peers,
  train,
  translation_peers,
)
from mixer_jax import config as config_lib
from mixer_jax import errors, experiment

ROOT = pathlib.Path(__file__).parents[2]


def test_each_optimizer_is_compiled_in_both_forms(monkeypatch):
  monkeypatch.setattr(compile_benchmark, "measure", lambda config, form: (config, form))
  monkeypatch.setattr(compile_benchmark, "cells", lambda row: row)
  monkeypatch.setattr(tables, "show", lambda titles, rows, texts: found.extend(rows))
  monkeypatch.setattr(compile_benchmark.compilation, "keep_in", lambda directory: None)
  found = []
  options = types.SimpleNamespace(
    models=["mixer_s4"], optimizers=["sgd", "kfac"], batch_size=2, dtype="bfloat16"
  )
  compile_benchmark.main(options)
  apart, scanned = (False, "one by one"), (True, "scanned")
  assert [(c.optimizer.name, bool(c.model.scan_blocks), form) for c, form in found] == [
    ("sgd", *apart),
    ("sgd", *scanned),
    ("kfac", *apart),
    ("kfac", *scanned),
  ]
  assert {(c.model.name, c.model.dtype, c.batch_size) for c, _ in found} == {
    ("mixer_s4", "bfloat16", 2)
  }


@pytest.mark.parametrize(
  "main, options, named",
  [
    (peers.main, dict(models=["mixer_s16", "resmlp_s12"]), "--models has 'resmlp_s12'"),
    (text_peers.main, dict(models=["bert_tiny"]), "--models has 'bert_tiny'"),
    (translation_peers.main, dict(models=["resmlp_translate_6"]), "--models has 'resmlp_tr"),
    (operator_peers.main, dict(published="nowhere", points=[512]), "--published is 'nowhere'"),
    (operator_peers.main, dict(published=None, points=[500]), "--points is 500"),
    (physics_peers.main, dict(candidates=["pina"], problems=[]), "--candidates has 'pina'"),
    (physics_peers.main, dict(candidates=None, problems=["heat"]), "--problems has 'heat'"),
    (configs.main, dict(configs=["mixer"], rounds=1, memory_only=True), "--configs has 'mixer'"),
    (optimizers.of_study, dict(study="configs/studies/small.py", run=None), "--run is missing"),
    (lambda _: peers.has("/nope/python", "torch"), {}, "--torch_python is '/nope/python'"),
    (lambda _: train.check(["mixer_s99"], ["sgd"]), {}, "mixer_s99"),
    (lambda _: train.check(["mixer_s4"], ["graft"]), {}, "--optimizers has 'graft'"),
    (lambda _: steps.Real(bucketed()), {}, "batches have several shapes"),
  ],
)
def test_mistakes_are_named(main, options, named):
  with pytest.raises(errors.UserError, match=named):
    main(types.SimpleNamespace(**options))


def bucketed():
  config = config_lib.default("tests.training.bucketed_task:NextNumber")
  config.batch_size = 8
  return experiment.build(config)


def test_a_flag_of_another_command_is_refused():
  command = [sys.executable, "-m", "benchmarks", "dispatch", "--batch_size=2"]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  assert done.returncode == 2 and "dispatch takes no --batch_size" in done.stderr


@pytest.mark.parametrize(
  "module, row, expected",
  [
    (
      train,
      train.Row("mixer_s16", "sgd", 64, 3 << 20, 5.0, 0.5, 0.875, 0.99),
      ["`mixer_s16`", "sgd", "2", "128.0", "88%", "3", "5.0", "0.990"],
    ),
    (
      inference,
      inference.Row("mixer_b16", 224, 59_880_472, 12_610_000_000, 3 << 20, 20.0, 0.05, 0.0625),
      ["`mixer_b16`", "20.0", "50.0", "62.5", "3"],
    ),
    (configs, configs.Row("mlm", 32, 3 << 20, 0.125), ["`mlm`", "32", "3", "0.125", "256"]),
    (configs, configs.Row("mlm", 32, 3 << 20), ["`mlm`", "32", "3", "-", "-"]),
    (
      compile_benchmark,
      compile_benchmark.Row("mixer_b16", "sgd", "scanned", 1.0, 2.25, 0.5, 3.75, 3 << 20),
      ["`mixer_b16`", "sgd", "scanned", "1.0", "2.2", "0.5", "3.8", "3"],
    ),
  ],
)
def test_cells_of_a_row(module, row, expected):
  assert module.cells(row) == expected and len(module.TITLES) == len(expected)


def test_a_table_in_markdown(capsys):
  tables.show(("model", "rate"), [("`a`", tables.number(0.02, ".1f", 1e-3)), ("`b`", "-")])
  assert capsys.readouterr().out.splitlines() == [
    "| model | rate |",
    "| :-- | --: |",
    "| `a` | 20.0 |",
    "| `b` | - |",
  ]
  assert tables.number(None, ".1f") == "-"


def run(*arguments):
  one_device = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
  command = [sys.executable, "-m", "benchmarks", *arguments, "--batch_size=2"]
  command += ["--rounds=1"] if arguments[0] != "compile" else []
  done = subprocess.run(command, cwd=ROOT, env=one_device, capture_output=True, text=True)
  assert not done.returncode, done.stderr
  return done.stdout


@pytest.mark.slow
def test_input_resident_and_streamed():
  printed = run("input", "--models=mixer_s32", "--photos=64", "--workers=0", "--workers=1")
  assert "resident: the bundled sample" in printed
  assert all(f"{n} workers" in printed for n in (0, 1))
  assert printed.count("ratio  ") == 2


@pytest.mark.slow
def test_peers_take_turns_in_processes_of_their_own():
  printed = run("peers", "--models=mixer_small", "--profile=3")
  assert all(
    f"| {call} | {name} |" in printed for call in ("forward", "step") for name in ("ours", "linen")
  )
  assert printed.count("| ours | `") == 3


@pytest.mark.slow
def test_text_peers_run_in_processes_of_their_own():
  printed = run("text_peers", "--max_length=16", f"--torch_python={sys.executable}")
  assert "batch 2 of 16 tokens, 2 of them masked, float32, AdamW" in printed
  assert "\n| ours | " in printed


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "compile", "inference", "zoo"])
def test_a_table_of_models(command):
  some = ["--optimizers=sgd"] if command in ("train", "compile") else []
  printed = run(command, "--models=mixer_small", *some)
  assert "\n| `mixer_small` | " in printed
