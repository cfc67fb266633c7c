"""Everything that the pages name exists: links, names, fields, defaults, snippets."""

import importlib
import importlib.util
import re
import types

import jax
import numpy as np
import optax
import pytest

from docs import site
from mixer_jax import config as config_lib
from mixer_jax import models, optim, optimizers, pretrained, tasks
from mixer_jax.rundir import directory as directory_lib
from tests.docs.commands import PAGES, ROOT, snippets

_LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<target>[^)#\s]*)(?:#(?P<heading>[\w-]+))?\)")
_CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_FILE = re.compile(r"\.(?:py|md|json|jsonl|txt|npz|png|pth|gz|svg|safetensors|yml)$")


def links(page):
  """(text, file, heading) of the links of a page to files of the repository."""
  found = _LINK.finditer(site.local((ROOT / page).read_text()))
  file = lambda target: (ROOT / page).parent / target if target else ROOT / page
  own = (m for m in found if "://" not in m["target"])
  return [(m["text"], file(m["target"]), m["heading"]) for m in own]


def headings(file):
  """The anchors of a page, as GitHub makes them."""
  found = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
  return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
  assert not [str(file) for _, file, _ in links(page) if not file.exists()]
  assert not [h for _, file, h in links(page) if h and h not in headings(file)]


OTHERS = {"nn", "dde", "net"}  # libraries


@pytest.fixture(scope="module")
def words():
  """The words of the package's code and of its paths."""
  paths = [*(ROOT / "mixer_jax").rglob("*.py")]
  texts = (*map(str, paths), *(path.read_text() for path in paths))
  return {word for text in texts for word in re.findall(r"\w+", text)}


@pytest.mark.parametrize("page", PAGES)
def test_names_in_backticks_exist(page, words):
  """`optimizer.damping`, `models.build(...)` and, as a link to its file, `load`."""
  unknown = []
  for text, file, _ in links(page):
    if text[0] == "`" and file.suffix == ".py":
      name = text.strip("`").rpartition(".")[2]
      unknown += [] if re.search(rf"\b{name}\b", file.read_text()) else [(name, str(file))]
  text = (ROOT / page).read_text()
  if page == "docs/from_elsewhere.md":
    text = re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)  # names of other libraries
  for code in _CODE.findall(text):
    name = re.match(r"(?:--)?([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)", code)
    if name and not _FILE.search(code.split()[0]) and not OTHERS & {name[1].split(".")[0]}:
      unknown += [name[1]] if {*name[1].split(".")[1:]} - words else []
  assert not unknown


def test_models_tasks_and_public_files_are_all_named():
  named = {
    "docs/models.md": models.VARIANTS,
    "docs/configs.md": tasks.TASKS,
    "docs/weights.md": pretrained.CATALOG,
    "docs/optimizers.md": [*optimizers.OPTIMIZERS, "graft"],
  }
  for page, names in named.items():
    text = site.filled((ROOT / page).read_text())
    assert not [name for name in names if f"`{name}`" not in text], page


# The loss that K-FAC's last ten steps stay below, and the least loss of Adam's.
OWN_MODELS = {"mlp": (0.005, 0.006), "transformer": (0.135, 0.14), "autoencoder": (0.08, 0.09)}


@pytest.mark.parametrize(
  "name",
  ["mlp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("transformer", "autoencoder"))],
)
@pytest.mark.thorough
def test_kfac_trains_somebody_s_own_model(name):
  path = ROOT / "docs" / "own_model.py"
  spec = importlib.util.spec_from_file_location(path.stem, path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  losses = getattr(module, name)()
  assert losses["adam"][0] == losses["kfac"][0] > 0.6
  kfac, adam = OWN_MODELS[name]
  assert losses["kfac"][-10:].mean() < kfac
  assert losses["adam"][-10:].mean() > adam


def test_the_readme_s_snippet_learns(capsys):
  """It prints its last loss; the loss of four equal probabilities is log 4."""
  (snippet,) = snippets("README.md")
  exec(snippet, names := {})
  assert float(capsys.readouterr().out) < np.log(4) / 20
  accuracy = (
    names["predict"](names["params"], names["batch"]).argmax(1) == names["batch"]["y"]
  ).mean()
  assert accuracy == 1.0


def usable(name):
  """Whether a library is there and works with this JAX."""
  try:
    importlib.import_module(name)
  except (ImportError, AttributeError):
    return False
  return True


def test_the_snippets_about_optimizers_learn():
  """In their order; the same net of each library has the same layers. Libraries may be missing."""
  names = {}
  for snippet in snippets("docs/optimizers.md"):
    if any(f"import {name}" in snippet and not usable(name) for name in ("equinox", "haiku")):
      continue
    exec(snippet, names)
    predict, params, batch = (names[name] for name in ("predict", "params", "batch"))
    blocks = optim.Curvature(predict, params, batch).blocks
    assert [block.factor_sizes for block in blocks] == [(17, 64), (65, 4)]
  assert names["losses"][-1] < names["losses"][0] / 20
  assert names["errors"][-1] < names["errors"][0] / 1000
  assert {block.kind for block in names["physics"].blocks} == {"kronecker"}


def test_the_task_of_the_page_fits_its_line():
  """Its metric is zero on the line, and the mean square of y for a net that is zero."""
  exec(snippets("docs/own_task.md")[0], names := {})
  task = names["Line"](types.SimpleNamespace(data={"examples": 50}))
  test = task.datasets()["test"].arrays()
  on_line = {"params": {"kernel": np.full((1, 1), 3.0), "bias": np.ones(1)}}
  zero = jax.tree.map(np.zeros_like, on_line)
  mean = lambda variables: task.evaluate(variables, test, np.ones(200))["squares"].value()
  assert float(mean(on_line)) < 1e-9
  np.testing.assert_allclose(mean(zero), np.square(test["y"]).mean(), rtol=1e-5)


def test_the_snippet_about_models_builds_one():
  (snippet,) = snippets("docs/models.md")
  exec(snippet, names := {})
  assert names["logits"].shape == (1, 10)
  assert {"ResMlpBlock_0", "ResMlpBlock_1"} == {
    name for name in names["variables"]["params"] if "Block" in name
  }


@pytest.mark.parametrize(
  "name, fields", [("mixer_small", dict(scan_blocks=True, num_blocks=2)), ("resnet_20", {})]
)
@pytest.mark.first(1)
def test_the_snippet_about_exported_weights_runs(name, fields, tmp_path, monkeypatch):
  (snippet,) = (s for s in snippets("docs/running.md") if "pretrained.read" in s)
  images = np.random.default_rng(0).normal(size=(2, 32, 32, 3)).astype(np.float32)
  model = models.build(name, 3, **fields)
  shapes = jax.eval_shape(model.init, jax.random.key(0), images)
  rng = np.random.default_rng(1)
  variables = jax.tree.map(lambda x: rng.uniform(0.1, 0.2, x.shape).astype(np.float32), shapes)
  pretrained.save(tmp_path / "weights.npz", pretrained.beside(variables), model)
  config = {"model": {"name": name, "dtype": None, **fields}}
  (tmp_path / "runs/first").mkdir(parents=True)
  directory_lib.write_json(tmp_path / "runs/first/config.json", config)
  monkeypatch.chdir(tmp_path)
  names = {"images": images}
  exec(snippet, names)
  np.testing.assert_allclose(names["logits"], model.apply(variables, images), rtol=1e-5)


@pytest.mark.thorough
def test_the_snippet_about_operators_learns(tmp_path, monkeypatch):
  """Waves that move by a quarter, in 60 steps; and the same operator on another grid."""
  (snippet,) = snippets("docs/operators.md")
  x, (size, shift) = np.arange(32) / 32, np.random.default_rng(0).normal(size=(2, 16, 1))
  wave = lambda x: np.float32(size * np.sin(2 * np.pi * x + shift))
  np.savez(tmp_path / "functions.npz", a=wave(x), u=wave(x - 0.25))
  monkeypatch.chdir(tmp_path)
  names = {}
  exec(snippet.replace("1000", "60"), names)
  error = np.linalg.norm(names["solutions"] - wave(x - 0.25)) / np.linalg.norm(wave(x))
  assert names["solutions"].shape == (16, 32) and error < 0.1


def test_the_snippets_for_those_who_come_from_elsewhere_do_what_they_say():
  own, theirs, chain, _, config, problem = snippets("docs/from_elsewhere.md")
  exec(own + "start = loss(params, batch)\n" + theirs, names := {})
  assert names["loss"](names["params"], names["batch"]) < names["start"] / 5
  exec(chain, names)
  moved = optax.apply_updates(names["params"], names["updates"])
  assert names["loss"](moved, names["batch"]) != names["loss"](names["params"], names["batch"])
  exec(config, names)
  config_lib.check(names["get_config"]())
  exec(problem, names)
  exact, points = names["poisson"]().exact, np.linspace(-1, 1, 9)[:, None]
  for term in names["poisson"]().terms.values():
    inside = points if term.count == 64 else points[[0, -1]]
    errors = [term.residual(exact, x) for x in inside]
    np.testing.assert_allclose(errors, np.zeros_like(errors), atol=1e-5)
