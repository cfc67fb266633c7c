"""The rows of inference."""

from mixer_jax.benchmark import inference


def test_rows_of_a_small_mixer():
  (row,) = inference.measure(["mixer_small"], 2, "float32", rounds=1, single_rounds=5)
  assert row.name == "mixer_small"
  assert row.peak_bytes > 4 * 4_747_496  # its parameters
  assert row.images_per_second > 0
  assert 0 < row.latency <= row.latency_p95


def test_rate_and_percentiles_by_hand(monkeypatch):
  # Batches of 8 take 1, 2 and 9 s, single images 1 to 21 s: the median is 11 s, and
  # 95% of the way from the least to the greatest is 20 s.
  times = {3: [1.0, 9.0, 2.0], 21: [float(i) for i in range(1, 22)]}
  monkeypatch.setattr(inference, "take_turns", lambda forms, n: dict.fromkeys(forms, times[n]))
  (row,) = inference.measure(["mixer_small"], 8, "float32", rounds=3, single_rounds=21)
  assert (row.images_per_second, row.latency, row.latency_p95) == (4.0, 11.0, 20.0)


def test_what_does_not_fit_is_said_so(monkeypatch):
  monkeypatch.setattr(inference, "fits", lambda size: False)
  (row,) = inference.measure(["mixer_small"], 2, "float32", rounds=1, single_rounds=1)
  assert row.images_per_second == 0.0
  assert inference.line(row).startswith("| `mixer_small` | does not fit | - | - | ")


def test_columns_of_the_table():
  row = inference.Row("mixer_b16", 3 << 20, 20.0, 0.05, 0.0625)
  assert inference.line(row) == "| `mixer_b16` | 20.0 | 50.0 | 62.5 | 3 |"
