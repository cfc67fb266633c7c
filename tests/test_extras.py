"""The small install: what its libraries suffice for, and what the other parts say without theirs."""

import configparser
from importlib import metadata
import os
import pathlib
import re
import subprocess
import sys

from packaging.requirements import Requirement
import pytest

ROOT = pathlib.Path(__file__).parent.parent

_STEP = """
import functools, http.server, pathlib, runpy, sys, threading
import jax, jax.numpy as jnp, numpy as np, optax
from mixer_jax import models, optim, pretrained

size = dict(hidden_dim=8, num_blocks=1, tokens_mlp_dim=4, channels_mlp_dim=8)
model = models.build("mixer_s16", 3, **size)
x = jax.random.normal(jax.random.key(0), (4, 32, 32, 3))
batch = {"x": x, "y": jnp.arange(4) % 3}
params = model.init(jax.random.key(1), x)["params"]

def predict(params, batch):
  return model.apply({"params": params}, batch["x"])

def loss(params):
  logits = predict(params, batch)
  return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

tx = optim.kfac(0.1, optim.Curvature(predict, params, batch))
more = dict(batch=batch, rng=jax.random.key(2))
updates, _ = tx.update(jax.grad(loss)(params), tx.init(params), params, **more)
stepped = optax.apply_updates(params, updates)
assert loss(stepped) < loss(params)

class Quiet(http.server.SimpleHTTPRequestHandler):
  def log_message(self, *_):
    pass

folder = pathlib.Path(sys.argv[1])
pretrained.save(folder / "own.npz", stepped, model)
handler = functools.partial(Quiet, directory=folder)
with http.server.ThreadingHTTPServer(("localhost", 0), handler) as server:
  threading.Thread(target=server.serve_forever, daemon=True).start()
  address = f"http://localhost:{server.server_port}/own.npz"
  _, found, _ = pretrained.load(address, "mixer_s16", image_size=32, cache_dir=folder / "cache", **size)
  server.shutdown()
assert all(map(np.array_equal, jax.tree.leaves(found), jax.tree.leaves(stepped)))

runpy.run_path(sys.argv[2])
"""


def _brought(requirements):
  """The distributions that pip brings for some requirements."""
  known, waiting = set(), [(Requirement(r), "") for r in requirements]
  while waiting:
    requirement, asked = waiting.pop()
    if requirement.marker and not requirement.marker.evaluate({"extra": asked}):
      continue
    for extra in {"", *requirement.extras} - {e for n, e in known if n == requirement.name}:
      known.add((requirement.name, extra))
      waiting += [(Requirement(r), extra) for r in metadata.requires(requirement.name) or ()]
  return {name for name, _ in known}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
  """Runs Python with the libraries that `pip install mixer_jax` brings, and no others."""
  folder = tmp_path_factory.mktemp("small")
  config = configparser.ConfigParser()
  config.read(ROOT / "setup.cfg")
  for name in _brought(config["options"]["install_requires"].strip().splitlines()):
    found = metadata.distribution(name)
    for top in {file.parts[0] for file in found.files} - {"..", "__pycache__"}:
      if not (folder / top).exists():
        (folder / top).symlink_to(found.locate_file(top))
  for name in ("tensorflow", "torch"):  # as if installed
    (folder / f"{name}.py").write_text(f"raise SystemExit('{name} is imported')")

  def run(*arguments):
    environment = os.environ | {"PYTHONPATH": f"{folder}:{ROOT}"}
    options = dict(cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    return subprocess.run([sys.executable, "-S", *arguments], **options)

  return run


def test_models_optimizers_and_weights_need_no_more(small, tmp_path):
  """They also import neither TensorFlow nor PyTorch where these are installed."""
  result = small("-c", _STEP, tmp_path, ROOT / "tests/typed_use.py")
  assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("module", ["main", "study", "evaluate", "report"])
def test_a_command_without_its_extra_names_it_in_one_line(small, module):
  result = small("-m", f"mixer_jax.{module}", "--workdir=run")
  assert result.returncode == 2
  assert re.fullmatch(r"error: .*pip install 'mixer_jax\[train\]'.*\n", result.stderr)


@pytest.mark.parametrize(
  "statement",
  ["mixer_jax.load_run('run')", "from mixer_jax import config", "import mixer_jax.study"],
)
def test_an_import_without_its_extra_names_it(small, statement):
  result = small("-c", f"import mixer_jax\n{statement}")
  assert result.returncode == 1
  assert "pip install 'mixer_jax[train]'" in result.stderr.splitlines()[-1]
