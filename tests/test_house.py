"""House rules that a reader of one file cannot see."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
SOURCES = {
  str(p.relative_to(ROOT / "mixer_jax")): p.read_text() for p in (ROOT / "mixer_jax").rglob("*.py")
}


def users_of(pattern):
  return {name for name, text in SOURCES.items() if re.search(pattern, text, re.MULTILINE)}


def test_kfac_jax_is_used_in_its_adapter_alone_and_by_public_names():
  assert users_of(r"^\s*(import|from) kfac_jax") == {
    "benchmark/peers.py",
    "optim/curvature.py",
    "optim/linen.py",
  }
  assert not users_of(r"kfac_jax\._|kfac_jax\._src")


def test_linen_is_for_models_and_tasks_and_the_adapter():
  allowed = re.compile(r"models/|tasks/|optim/linen.py")
  assert all(allowed.match(name) for name in users_of(r"flax\.linen"))


def test_arrows_run_one_way():
  assert not [
    n for n in users_of(r"mixer_jax[. ].*(train|tasks|data|optim)") if n.startswith("models/")
  ]
  assert not [
    n
    for n in users_of(r"^(from|import) mixer_jax[. ](import )?(models|tasks|data|train)\b")
    if n.startswith("optim/")
  ]
  assert not [n for n in users_of(r"mixer_jax[. ](import )?tasks") if n.startswith("data/")]


@pytest.mark.parametrize(
  "name", ["pmap", "jax_utils.replicate", r"jax\.experimental.*shard_map", "import tensorflow$"]
)
def test_what_has_gone_stays_away(name):
  assert not users_of(name)


def test_devices_are_told_apart_in_the_inversions_alone():
  assert users_of("shard_map") == {"optim/algebra.py"}


def test_all_but_kfac_runs_without_kfac_jax():
  """A kfac-jax that does not fit the installed JAX must not stop other optimizers."""
  script = """
import sys
sys.modules["kfac_jax"] = None
import jax
from mixer_jax import config, experiment, errors, optim, train
config = config.default()
config.model.num_blocks = 1
config.model.hidden_dim = 16
config.data.train_split = "train[:64]"
run = experiment.build(config)
train.EpochTrainer(run)(train.init_state(run), 1)
try:
  optim.kfac(0.1, lambda p, b: b, {}, 0)
except ImportError as e:
  print(e)
"""
  result = subprocess.run(
    [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120
  )
  assert result.returncode == 0, result.stderr
  assert re.search(r"K-FAC needs a kfac-jax that works with JAX \d.*kfac-jax \d", result.stdout)


def test_lengths():
  assert not {name: text.count("\n") for name, text in SOURCES.items() if text.count("\n") > 320}
