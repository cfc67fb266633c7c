"""House rules that a reader of one file cannot see."""

import ast
import json
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "mixer_jax"
SOURCES = {p.relative_to(PACKAGE).as_posix(): p.read_text() for p in PACKAGE.rglob("*.py")}

# Each room may import the rooms before it.
ORDER = (
  "extras errors paths npz options models runtime rundir pretrained data images text pde optim optimizers tasks"
  " config recipes experiment training study report planning commands"
).split()
COMMANDS = ("main.py", "evaluate.py", "predict.py", "export.py", "probe.py", "plan.py")
# Rooms that know less than the order allows.
ALONE = {
  "models": {"errors", "options"},
  "data": {"errors", "paths", "options", "runtime"},
  "images": {"errors", "paths", "npz", "options", "data", "runtime"},
  "text": {"errors", "paths", "options", "data", "runtime"},
  "pde": {"errors", "paths", "npz", "options", "data"},
  "optim": {"errors", "runtime"},
  "optimizers": {"errors", "options", "optim"},
  "pretrained": {"errors", "paths", "npz", "options", "models", "runtime"},
  "rundir": {"errors", "paths", "runtime"},
}


def room(path):
  """The room of a file of the package."""
  if path in COMMANDS or path.endswith("__main__.py"):
    return "commands"
  return path.partition("/")[0].removesuffix(".py")


def imports(text):
  """The modules that a file imports anywhere, by their whole names."""
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      assert not node.level  # names of modules are whole
      yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports():
  """Pairs of a file and the room that it imports."""
  for path, text in SOURCES.items():
    for name in imports(text):
      parts = name.split(".")
      if parts[0] == "mixer_jax" and len(parts) > 1 and not parts[1].startswith("__"):
        yield path, parts[1]


def users_of(pattern):
  """The files whose code, examples in docstrings aside, has the pattern."""
  code = {name: re.sub(r"```.*?```", "", text, flags=re.DOTALL) for name, text in SOURCES.items()}
  return {name for name, text in code.items() if re.search(pattern, text, re.MULTILINE)}


def test_rooms_are_known():
  assert {room(path) for path in SOURCES} - {"__init__"} == set(ORDER)


def test_arrows_run_one_way():
  wrong = {
    f"{path} -> {other}"
    for path, other in own_imports()
    if room(path) not in ("__init__", other) and ORDER.index(other) >= ORDER.index(room(path))
  }
  assert not wrong


def test_models_data_and_optimizers_know_no_task():
  assert not {
    f"{path} -> {other}"
    for path, other in own_imports()
    if room(path) in ALONE and other not in ALONE[room(path)] | {room(path)}
  }


def test_keys_are_made_in_one_place():
  """Those of JAX follow its settings; `optim` takes the user's keys, and a shape needs no draw."""
  made = users_of(r"^(?!.*eval_shape\().*jax\.random\.(key|PRNGKey|wrap_key_data)\(")
  assert {x for x in made if room(x) != "optim"} == {"runtime/draws.py"}


def test_the_package_needs_nothing_beside_it():
  beside = ("benchmarks", "tests", "docs", "configs", "colabs", "results")
  found = {n.partition(".")[0] for text in SOURCES.values() for n in imports(text)}
  assert not found & set(beside)


def test_kfac_jax_is_used_in_its_adapter_alone_and_by_public_names():
  assert users_of(r"^\s*(import|from) kfac_jax") == {"optim/curvature/kfac_jax_blocks.py"}
  assert not users_of(r"kfac_jax\._|kfac_jax\._src")


@pytest.mark.thorough
def test_all_but_kfac_runs_without_kfac_jax(tmp_path):
  """A kfac-jax that does not fit the installed JAX must not stop other optimizers."""
  script = """
import sys
from importlib import metadata
installed = metadata.version
def version(name):
  if name == "kfac-jax":
    raise metadata.PackageNotFoundError(name)
  return installed(name)
metadata.version = version
sys.modules["kfac_jax"] = None
from mixer_jax import config, optim, optimizers
from mixer_jax.training import loop
config = config.default("docs.own_task:Derivative")
config.num_epochs = 1
config.data.examples = 64
config.data.points = 8
loop.train(config, sys.argv[1])
try:
  optim.Curvature(lambda p, b: b, {}, {})
except ImportError as e:
  print(e)
"""
  result = subprocess.run(
    [sys.executable, "-c", script, tmp_path], cwd=ROOT, capture_output=True, text=True, timeout=120
  )
  assert result.returncode == 0, result.stderr
  assert re.search(r"K-FAC needs a kfac-jax.*\(no kfac-jax is installed", result.stdout)
  [session] = json.loads((tmp_path / "run.json").read_text())["sessions"]
  assert session["versions"]["kfac-jax"] is None and session["versions"]["jax"]


def test_a_kfac_jax_that_does_not_work_with_jax_fails_at_once_in_one_line():
  """Its tags use parts of JAX that are not public, and would raise in a run's first step."""
  script = """
from mixer_jax import optim
from mixer_jax.runtime import imports
with imports.moved_names():
  import kfac_jax
def moved(*args, **options):
  raise AttributeError("module 'jax' has no attribute 'unsafe_get_axis_names'")
kfac_jax.register_dense = moved
try:
  optim.Curvature(lambda p, b: b, {}, {})
except ImportError as e:
  print(e)
"""
  result = subprocess.run(
    [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120
  )
  line = r"K-FAC needs a kfac-jax that works with JAX \d[\d.]+ \(kfac-jax \d.*unsafe_get_axis_names"
  assert re.search(line, result.stdout), result.stderr
  assert result.stdout.count("\n") == 1
