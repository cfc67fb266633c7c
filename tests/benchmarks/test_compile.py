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
