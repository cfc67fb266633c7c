"""Sizes and speed of models against numbers known from elsewhere."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks import flops, inference


def test_multiply_adds_by_hand():
  def layers(x, w, images, kernel):
    def body(carry, _):
      return carry @ w @ w.T, None

    x, _ = jax.lax.scan(body, x, length=3)
    y = jax.lax.conv_general_dilated(
      images, kernel, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return x.sum() + jnp.tanh(y).sum()

  shapes = [jnp.zeros(s) for s in ((5, 4), (4, 7), (2, 8, 8, 3), (2, 2, 3, 6))]
  scanned = 3 * (5 * 4 * 7 + 5 * 7 * 4)
  convolution = 2 * 4 * 4 * 6 * (2 * 2 * 3)
  assert flops.multiply_adds(jax.jit(layers), *shapes) == scanned + convolution


@pytest.mark.thorough
def test_row_of_a_small_mixer():
  (row,) = inference.measure(["mixer_small"], 2, "float32", rounds=1, single_rounds=5)
  # 64 tokens, 256 channels, 8 blocks of 256 and 1024 hidden units, 1,000 classes.
  block = 256 * 2 * 64 * 256 + 64 * 2 * 256 * 1024
  assert row.multiply_adds == 64 * 48 * 256 + 8 * block + 256 * 1000
  assert row.parameters == 4_747_496
  assert row.peak_bytes > 4 * row.parameters
  assert row.images_per_second > 0
  assert 0 < row.latency <= row.latency_p95
  assert inference.zoo_cells(row)[:4] == ["`mixer_small`", "32", "4.7", "0.34"]


@pytest.mark.thorough
def test_sizes_alone_and_with_absorbed_affine_layers():
  row, absorbed = inference.measure(["resmlp_s12"], 1, "float32", rounds=0)
  assert row.images_per_second is None
  assert inference.zoo_cells(row)[-1] == "-"
  assert round(row.multiply_adds / 1e9, 1) == 3.0  # ResMLP, Table 1
  assert absorbed.name == "resmlp_s12, absorbed"
  # Aff (2 x 384) twice and LayerScale (384) twice go from each of 12 blocks, the
  # cross-patch bias (196), and the last Aff; a scale and a bias a token come.
  gone = 12 * (6 * 384 + 196) + 2 * 384
  assert row.parameters - absorbed.parameters == gone - 12 * (384 + 196 * 384)


@pytest.mark.thorough
def test_rate_and_percentiles_by_hand(monkeypatch):
  # Batches of 8 take 1, 2 and 9 s, single images 1 to 21 s: the median is 11 s, and
  # 95% of the way from the least to the greatest is 20 s.
  times = {3: [1.0, 9.0, 2.0], 21: [float(i) for i in range(1, 22)]}
  monkeypatch.setattr(inference, "take_turns", lambda forms, n: dict.fromkeys(forms, times[n]))
  (row,) = inference.measure(["mixer_small"], 8, "float32", rounds=3, single_rounds=21)
  assert (row.images_per_second, row.latency, row.latency_p95) == (4.0, 11.0, 20.0)


@pytest.mark.thorough
def test_a_model_that_does_not_fit_is_not_run(monkeypatch):
  monkeypatch.setattr(inference, "fits", lambda size: False)
  (row,) = inference.measure(["mixer_small"], 2, "float32", rounds=1, single_rounds=1)
  assert row.images_per_second is None
  assert inference.cells(row)[1:4] == ["-", "-", "-"]
