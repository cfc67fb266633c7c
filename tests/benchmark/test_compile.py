"""The rows of compilation."""

import pytest

from mixer_jax import errors
from mixer_jax.benchmark import compile as compile_benchmark


def test_a_row(tiny_config):
  row = compile_benchmark._measure(tiny_config, "scanned")
  assert (row.model, row.optimizer, row.blocks) == ("mixer_small", "adam", "scanned")
  assert min(row.trace, row.compile, row.init, row.processor) > 0
  images = 256 * 8 * 8 * 3
  assert images < row.peak_bytes < 2**27  # the step's own arguments and temporaries


def test_each_optimizer_is_compiled_in_both_forms(monkeypatch):
  monkeypatch.setattr(compile_benchmark, "_measure", lambda config, form: (config, form))
  rows = list(compile_benchmark.measure(["mixer_s4"], ["sgd", "kfac"], 2, "bfloat16"))
  found = [(c.optimizer.name, bool(c.model.scan_blocks), form) for c, form in rows]
  apart, scanned = (False, "one by one"), (True, "scanned")
  assert found == [("sgd", *apart), ("sgd", *scanned), ("kfac", *apart), ("kfac", *scanned)]
  assert {(c.model.name, c.model.dtype, c.batch_size) for c, _ in rows} == {
    ("mixer_s4", "bfloat16", 2)
  }


def test_columns_of_the_table():
  row = compile_benchmark.Row("mixer_b16", "sgd", "scanned", 1.0, 2.25, 0.5, 3.75, 3 << 20)
  expected = "| `mixer_b16` | sgd | scanned | 1.0 | 2.2 | 0.5 | 3.8 | 3 |"
  assert compile_benchmark.line(row) == expected
  assert {x.count("|") for x in compile_benchmark.HEADER.splitlines()} == {expected.count("|")}


def test_unknown_names_are_refused_at_once():
  with pytest.raises(errors.UserError, match="'sdg'; allowed: sgd, adam"):
    compile_benchmark.measure(["mixer_s4"], ["sdg"], 2, "float32")
