"""The rows of compilation."""

import pytest

from benchmarks import compile as compile_benchmark


@pytest.mark.slow
def test_a_row(tiny_config):
  row = compile_benchmark.measure(tiny_config, "scanned")
  assert (row.model, row.optimizer, row.blocks) == ("mixer_small", "adam", "scanned")
  assert min(row.trace, row.compile, row.init, row.processor) > 0
  images = 256 * 8 * 8 * 3
  assert images < row.peak_bytes < 2**27  # the step's own arguments and temporaries


def test_columns_of_the_table():
  row = compile_benchmark.Row("mixer_b16", "sgd", "scanned", 1.0, 2.25, 0.5, 3.75, 3 << 20)
  expected = ["`mixer_b16`", "sgd", "scanned", "1.0", "2.2", "0.5", "3.8", "3"]
  assert compile_benchmark.cells(row) == expected
  assert len(compile_benchmark.TITLES) == len(expected)
