"""The commands: the jobs that they make of their flags, and their refusals."""

import os
import pathlib
import subprocess
import sys
import types

import pytest

from benchmarks import __main__ as command_line
from benchmarks import compile as compile_benchmark
from benchmarks import peers, tables, train
from mixer_jax import errors

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
  "names, chosen, message",
  [
    (["mixer_s4", "mixer_s99"], ["sgd"], "mixer_s99"),
    (["mixer_s4"], ["graft"], "'graft'; allowed: sgd, adam"),
  ],
)
def test_unknown_names_are_refused(names, chosen, message):
  with pytest.raises(errors.UserError, match=message):
    train.check(names, chosen)


def test_each_command_says_which_flags_it_takes():
  assert command_line._TAKEN.keys() == command_line._COMMANDS.keys()
  done = subprocess.run(
    [sys.executable, "-m", "benchmarks", "dispatch", "--batch_size=2"],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 2
  assert done.stderr == "error: dispatch takes no --batch_size; it takes --config, --rounds\n"


def test_peers_are_of_mixers():
  with pytest.raises(errors.UserError, match="--models has 'resmlp_s12'; allowed: Mixers"):
    peers.main(types.SimpleNamespace(models=["mixer_s16", "resmlp_s12"]))


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
