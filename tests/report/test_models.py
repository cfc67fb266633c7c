"""The table of the zoo against sizes known from elsewhere."""

import jax
import jax.numpy as jnp

from mixer_jax import flops
from mixer_jax.report import models as table


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


def test_row_of_a_small_mixer():
  (row,) = table.measure(["mixer_small"], batch_size=2, rounds=1)
  # 64 tokens, 256 channels, 8 blocks of 256 and 1024 hidden units, 1,000 classes.
  block = 256 * 2 * 64 * 256 + 64 * 2 * 256 * 1024
  assert row.multiply_adds == 64 * 48 * 256 + 8 * block + 256 * 1000
  assert row.parameters == 4_747_496
  assert row.peak_bytes > 4 * row.parameters
  assert row.images_per_second > 0
  assert table.line(row).startswith("| `mixer_small` | 32 | 4.7 | 0.34 |")


def test_sizes_alone_and_with_absorbed_affine_layers():
  row, absorbed = table.measure(["resmlp_s12"], batch_size=1, rounds=0)
  assert row.images_per_second == 0.0
  assert table.line(row).endswith("| - |")
  assert round(row.multiply_adds / 1e9, 1) == 3.0  # ResMLP, Table 1
  assert absorbed.name == "resmlp_s12, absorbed"
  # Aff (2 x 384) twice and LayerScale (384) twice go from each of 12 blocks, the
  # cross-patch bias (196), and the last Aff; a scale and a bias a token come.
  gone = 12 * (6 * 384 + 196) + 2 * 384
  assert row.parameters - absorbed.parameters == gone - 12 * (384 + 196 * 384)
