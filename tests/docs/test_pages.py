"""What the pages say exists: links, names, options, defaults, scripts, snippets."""

import ast
import importlib.util
import inspect
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mixer_jax import experiment, in_memory, models, optim, pretrained, tasks
from tests.docs.commands import PAGES, ROOT, snippets

_LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<target>[^)#\s]+)\)")
_DEFINITION = r"^\s*(?:def|class) {0}\b|^{0}\s*="


def load(path):
  spec = importlib.util.spec_from_file_location(path.stem, path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def links(page):
  """(text, file) of the links of a page to files of the repository."""
  text = (ROOT / page).read_text()
  found = [(m["text"], m["target"]) for m in _LINK.finditer(text)]
  return [(t, (ROOT / page).parent / f) for t, f in found if "://" not in f]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
  assert not [str(file) for _, file in links(page) if not file.exists()]


@pytest.mark.parametrize("page", ["docs/kfac.md", "docs/design.md"])
def test_the_code_that_a_page_names_is_where_it_says(page):
  named = [(text.strip("`"), file) for text, file in links(page) if text.startswith("`")]
  assert len(named) > 9
  for name, file in named:
    assert re.search(_DEFINITION.format(name), file.read_text(), re.MULTILINE), (name, file)


def rows(page, heading):
  """Cells of the table under a heading."""
  section = (ROOT / page).read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
  lines = [line for line in section.splitlines() if line.startswith("|")][2:]
  return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_settings_of_kfac_are_its_own():
  """Names and defaults of the table are those of the code; none is left out."""
  told = {}
  for names, defaults, _ in rows("docs/kfac.md", "The settings"):
    values = defaults.split(", ")
    told |= {n.strip("`"): ast.literal_eval(v) for n, v in zip(names.split(", "), values)}
  parameters = {}
  for function in (optim.scale_by_kfac, optim.kfac):
    parameters |= inspect.signature(function).parameters
  for absent in ("predict", "params", "batch", "options", "learning_rate", "plain", "decay_mask"):
    parameters.pop(absent)
  assert told == {name: p.default for name, p in parameters.items()}


def test_the_readme_lists_optimizers_with_their_options():
  told = {
    name.strip("`"): set(re.findall(r"`(\w+)`", options))
    for name, _, options in rows("README.md", "Optimizers")
  }
  assert told.pop("graft") == {"magnitude", "direction", "scope", "eps"}
  assert told.pop("kfac") == set()  # a page of its own
  own = {name: set(optim._options(name)) for name in optim.NAMES if name not in ("graft", "kfac")}
  assert told == own


def test_models_and_public_files_are_all_named():
  for page in ("README.md", "docs/models.md"):
    text = (ROOT / page).read_text()
    assert not [name for name in models.VARIANTS if f"`{name}`" not in text]
  text = (ROOT / "docs/weights.md").read_text()
  assert not [name for name in pretrained.CATALOG if f"`{name}`" not in text]
  assert f"{len(pretrained.CATALOG)} names" in (ROOT / "README.md").read_text()


def test_kfac_trains_somebody_s_own_model():
  losses = load(ROOT / "docs" / "own_model.py").main(steps=200)
  assert losses[0] > 0.6 and losses[-1] < 0.02


def test_turned_images_are_labelled_by_their_turn(tiny_config):
  """The own task of the documents, against NumPy."""
  own_task, config = load(ROOT / "docs" / "own_task.py"), tiny_config
  run = experiment.build(config)
  task = own_task.Rotation(run.task.model, run.task.images)
  images, labels = run.dataset.test.images[:8], run.dataset.test.labels[:8]
  batch = task.batch(None, images, labels, train=False)
  upright = run.task.batch(None, images, labels, train=False)["image"]
  np.testing.assert_array_equal(batch["label"], [0, 1, 2, 3, 0, 1, 2, 3])
  for turned, original, k in zip(batch["image"], upright, batch["label"]):
    np.testing.assert_array_equal(turned, np.rot90(original, k))
  trained_on = task.batch(
    jax.random.key(0), np.repeat(images, 20, 0), np.repeat(labels, 20), train=True
  )
  assert set(np.unique(trained_on["label"])) == {0, 1, 2, 3}


def test_the_readme_s_snippets_run(tiny_config):
  """K-FAC and grafting step a model; a task of one's own trains; both on tiny data."""
  kfac_snippet, task_snippet = snippets("README.md")
  x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
  model, batch = nn.Dense(3), {"x": x}
  params = model.init(jax.random.key(0), x)["params"]
  names = dict(model=model, params=params, batch=batch, key=jax.random.key(1), optax=optax)
  setup, _, step = kfac_snippet.partition("updates, state")
  exec(setup, names)
  grads = jax.tree.map(jnp.ones_like, params)
  names |= dict(grads=grads, state=names["tx"].init(params))
  exec("updates, state" + step, names)
  # As long as SGD's first step, 0.1 times the gradient's length.
  for name, update in names["updates"].items():
    np.testing.assert_allclose(np.linalg.norm(update), 0.1 * np.sqrt(grads[name].size), rtol=1e-5)

  printed = []
  tiny_config.num_epochs = 1
  names = dict(config=tiny_config, experiment=experiment, in_memory=in_memory)
  model = experiment.build_model(tiny_config.model, 4)
  names |= dict(MyTask=tasks.Classification, model=model)
  exec(task_snippet, names | {"print": lambda *values: printed.append(values)})
  assert [epoch for epoch, _ in printed] == [1]
