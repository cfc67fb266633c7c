"""The notebooks: their committed form, quickly; their results, in `pytest -m slow`."""

import ast
import configparser
import importlib.util
import inspect
import math
import re

from IPython.core.inputtransformer2 import TransformerManager
import nbformat
import pytest

from docs import site
from tests.colabs import NOTEBOOKS, ROOT, execute, read

NAMES = (
  "curvature",
  "finetune_b16",
  "inside_mlps",
  "kfac_and_grafting",
  "mixer_jax",
  "operators",
  "physics",
  "recipes",
  "text",
  "translation",
)


def address():
  setup = configparser.ConfigParser()
  setup.read(ROOT / "setup.cfg")
  return setup["metadata"]["url"]


def code_cells(name):
  return [cell for cell in read(name).cells if cell.cell_type == "code"]


def outputs(name):
  return [output for cell in code_cells(name) for output in cell.outputs]


def test_all_notebooks_are_known():
  assert tuple(path.stem for path in NOTEBOOKS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_is_valid_and_small(name):
  nbformat.validate(read(name))
  assert (ROOT / "colabs" / f"{name}.ipynb").stat().st_size < 600_000


@pytest.mark.parametrize("name", NAMES)
def test_opens_in_colab_and_installs_by_one_cell(name):
  first, install = read(name).cells[:2]
  repository = address().removeprefix("https://github.com/")
  opens = f"https://colab.research.google.com/github/{repository}/blob/main/colabs/{name}.ipynb"
  assert first.cell_type == "markdown" and f"]({opens})" in first.source
  assert f"git+{address()}" in install.source
  assert ["%pip" in cell.source for cell in code_cells(name)].count(True) == 1


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_to_pages_of_the_site(name):
  """Relative ones hold neither there nor on Colab; the last cell says where to go on."""
  told = [cell.source for cell in read(name).cells if cell.cell_type == "markdown"]
  assert "## Go on" in told[-1]
  links = re.findall(r"\]\(([^)\s]+)\)", "\n".join(told))
  assert all(link.startswith("https://") for link in links)
  pages = [link.removeprefix(site.ADDRESS) for link in links if link.startswith(site.ADDRESS)]
  assert len(pages) >= 3
  for page in pages:
    path = page.partition("#")[0].removesuffix("/")
    assert (ROOT / f"{path}.ipynb").exists() or (ROOT / "docs" / f"{path}.md").exists(), page


@pytest.mark.parametrize("name", NAMES)
def test_every_cell_compiles_and_imports_what_exists(name):
  for cell in code_cells(name):
    tree = ast.parse(TransformerManager().transform_cell(cell.source))
    for node in ast.walk(tree):
      if isinstance(node, ast.Import):
        assert all(importlib.util.find_spec(alias.name) for alias in node.names)
      elif isinstance(node, ast.ImportFrom):
        module = importlib.import_module(node.module)
        for alias in node.names:
          whole = f"{node.module}.{alias.name}"
          assert hasattr(module, alias.name) or importlib.util.find_spec(whole), whole


@pytest.mark.parametrize("name", NAMES)
def test_every_name_of_a_module_exists_and_its_call_fits(name):
  """Cells run only in slow tests: a name or an argument that has gone shows here."""
  trees = [ast.parse(TransformerManager().transform_cell(c.source)) for c in code_cells(name)]
  modules = {
    alias.asname or alias.name: importlib.import_module(f"{node.module}.{alias.name}")
    for node in (node for tree in trees for node in ast.walk(tree))
    if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "mixer_jax"
    for alias in node.names
    if importlib.util.find_spec(node.module).submodule_search_locations
    and importlib.util.find_spec(f"{node.module}.{alias.name}")
  }
  assert modules
  for node in (node for tree in trees for node in ast.walk(tree)):
    if isinstance(node, ast.Attribute) and getattr(node.value, "id", None) in modules:
      assert hasattr(modules[node.value.id], node.attr), ast.unparse(node)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
      module = modules.get(getattr(node.func.value, "id", None))
      starred = any(isinstance(argument, ast.Starred) for argument in node.args)
      if module and not starred and all(keyword.arg for keyword in node.keywords):
        keywords = {keyword.arg: None for keyword in node.keywords}
        inspect.signature(getattr(module, node.func.attr)).bind(*node.args, **keywords)


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_there_and_clean(name):
  """Executed from top to bottom, with figures; no error, no warning, no path of a machine."""
  cells = code_cells(name)
  assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
  found = outputs(name)
  assert sum("image/png" in output.get("data", {}) for output in found) >= 1
  assert not [output for output in found if output.output_type == "error"]
  texts = [o.get("text", "") for o in found] + [
    text for o in found for kind, text in o.get("data", {}).items() if kind.startswith("text/")
  ]
  told = "\n".join(texts)
  assert not re.findall(r"(?i)\b\w*warning\b.*|Traceback.*", told)
  # Colab runs every notebook in /content.
  paths = re.findall(r"(?<![\w.:/])/(?:\w[\w.-]*/)+[\w.-]*", told)
  assert not [path for path in paths if not path.startswith("/content/")]


@pytest.mark.slow
def test_mixer_jax_s_results(tmp_path):
  """All three optimizers are far above 10%; the restored run is the trained one."""
  found = execute(
    "mixer_jax",
    tmp_path,
    {
      "last_top1": "{name: rows[-1]['test/top1'] for name, rows in history.items()}",
      "epochs": "{name: [row['epoch'] for row in rows] for name, rows in history.items()}",
      "first": "history['K-FAC'][0]['train/loss']",
      "last": "history['K-FAC'][-1]['train/loss']",
      "restored": "restored_accuracy",
      "logged": "history['K-FAC'][-1]['test/top1']",
      "stopped": "[row['step'] for row in interrupted]",
      "sessions": "[s['from_step'] for s in __import__('json').loads((directory / 'run.json').read_text())['sessions']]",
      "pictures": "list(pictures)",
      "sum": "float(scores.sum())",
      "frog": "float(scores[class_names.index('frog')])",
    },
  )
  top1 = found["last_top1"]
  assert top1.keys() == {"K-FAC", "SGD", "Adam"}
  # One standard error over 1,000 images is at most 1.6 points.
  assert top1["K-FAC"] > 0.38 and top1["SGD"] > 0.35 and top1["Adam"] > 0.28
  assert found["last"] < found["first"] - 0.3
  assert all(epochs == [1, 2, 3, 4, 5, 6] for epochs in found["epochs"].values())
  assert found["restored"] == pytest.approx(found["logged"], abs=1e-6)
  assert found["stopped"][0] == 78 and len(found["stopped"]) < 6
  first, second = found["sessions"]
  assert first == 0 and 78 <= second < 468
  assert found["pictures"] == ["confusion", "mistakes"]
  assert found["sum"] == pytest.approx(1.0, abs=1e-5) and found["frog"] > 0.1


@pytest.mark.slow
def test_curvature_s_results(tmp_path):
  """Layers of four libraries, the exact Fisher matrix by a Jacobian, the same losses, both optimizers."""
  found = execute(
    "curvature",
    tmp_path,
    {
      "sizes": "{name: [b.factor_sizes for b in c.blocks] for name, c in curvatures.items()}",
      "answers": "apart",
      # With J the derivative of 3 outputs, and a loss without one half, F is the mean of 2 J^T J.
      "jacobian": """float((lambda J: np.linalg.norm(2 * np.einsum('noi,noj->ij', J, J) / len(J) - F)
        / np.linalg.norm(F))(np.asarray(jax.vmap(lambda x: jax.jacobian(lambda v: plain(
          tree_of(curvatures['plain JAX'], [m.reshape(s) for m, s in zip(
            jnp.split(v, np.cumsum([m.size for m in same])[:-1]), [m.shape for m in same])],
            params['plain JAX']), x))(jnp.concatenate([m.ravel() for m in same])))(places))))""",
      "difference": "float(difference)",
      "cosines": "cosines",
      "losses": "{name: [float(x) for x in own] for name, own in losses.items()}",
      "unseen": "[block.paths[0] for block in seen.blocks if block.kind == 'gradient']",
      "wide": "{name: losses[-1] for name, (_, losses, _) in runs.items()}",
      "small": "{name: losses[-1] for name, (_, losses, _) in small_runs.items()}",
      "slopes": "{name: losses[-1] for name, (_, losses, _) in slope_runs.items()}",
      "off": "off",
      "grey": "float(jnp.std(grey))",
    },
  )
  assert len(found["sizes"]) == 4
  assert all(sizes == [[3, 16], [17, 16], [17, 3]] for sizes in found["sizes"].values())
  assert found["answers"] < 1e-5 and found["jacobian"] < 1e-4 and found["difference"] < 1e-5
  assert found["unseen"] == ["v"]
  assert all(kfac > diagonal for kfac, diagonal in found["cosines"]["dense"].values())
  assert len(found["cosines"]["attention"]) == 8
  for losses in found["losses"].values():
    assert losses == pytest.approx(found["losses"]["Linen"], rel=0.02)
    assert losses[-1] < losses[0] / 4
  assert found["wide"]["K-FAC"] < found["wide"]["Adam"] / 2
  assert found["small"]["K-FAC"] < found["small"]["Adam"] < 2.303  # that of guessing
  assert found["slopes"]["K-FAC"] < found["slopes"]["Adam"]
  assert all(error < 0.2 * found["grey"] for error in found["off"].values())


@pytest.mark.slow
def test_kfac_and_grafting_s_results(tmp_path):
  """The Kronecker errors, the transform against a dense solver, K-FAC against SGD and Adam."""
  found = execute(
    "kfac_and_grafting",
    tmp_path,
    {
      "errors": "errors",
      "cosines": "cosines",
      "lowest": "np.linalg.eigvalsh(F)[0] / np.linalg.eigvalsh(F)[-1]",
      # E over labels of the gradient with respect to logits, times itself: diag(p) - p p^T.
      "bias": """np.abs(
        F[-10:, -10:] - np.mean([np.diag(p) - np.outer(p, p)
          for p in np.asarray(jax.nn.softmax(predict(descend(start), x)), np.float64)], axis=0)).max()""",
      "transform": "transform_error",
      "own": "own_loss",
      "pairs": "{f'{m},{d}': rows[-1]['train/loss'] for (m, d), rows in pairs.items()}",
      "norms": """{f'{m},{d}': [rows[-1][f'train/norm.{s}.head'] for s in SIDES]
        for (m, d), rows in pairs.items()}""",
      "dampings": "{str(d): rows[-1]['train/loss'] for d, rows in dampings.items()}",
      "cadences": "[rows[-1]['train/loss'] for rows in cadences.values()]",
      "deep": "{name: rows[-1]['train/loss'] for name, rows in curves.items()}",
    },
  )
  assert found["lowest"] > -1e-6 and found["bias"] < 1e-5  # F is a Fisher matrix
  for errors in found["errors"].values():
    assert errors["nearest"] <= errors["K-FAC"] < 0.6 < errors["diagonal"]
  cosines = found["cosines"]
  assert cosines["K-FAC"] > 0.75 and cosines["K-FAC"] > max(
    cosines["diagonal"], cosines["gradient"]
  )
  assert found["transform"] < 1e-3
  own = found["own"]
  assert own["K-FAC"] < 0.003 and own["K-FAC"] < min(own["SGD"], own["Adam"]) / 3
  # 32 principal components leave 0.988; K-FAC has half of Adam's epochs.
  assert found["deep"]["K-FAC"] < found["deep"]["Adam"] - 0.1 < found["deep"]["SGD"] - 0.5
  # The mean loss of an epoch; 2.303 is that of guessing.
  assert all(loss < 2.28 for loss in found["pairs"].values())
  for pair in ("SGD,K-FAC", "K-FAC,K-FAC"):
    assert found["pairs"][pair] < found["pairs"]["SGD,SGD"]
  for pair, (magnitude, direction) in found["norms"].items():
    same = len(set(pair.split(","))) == 1
    assert (magnitude == pytest.approx(direction, rel=1e-5)) == same
  assert found["dampings"]["0.1"] < found["dampings"]["10.0"] < 2.303
  assert all(loss < 2.2 for loss in found["cadences"])


@pytest.mark.slow
def test_inside_mlps_results(tmp_path):
  """All families learn; Aff is absorbed exactly; operations are those of the formula."""
  found = execute(
    "inside_mlps",
    tmp_path,
    {
      "accuracy": "{f'{f},{w}': value for (f, w), value in accuracy.items()}",
      "mixer": "costs['Mixer', 64]",
      "difference": "difference / float(np.abs(logits).max())",
      "agree": "float(np.mean(logits.argmax(1) == absorbed.argmax(1)))",
      "locality": "[locality[i] for i in sorted(locality)]",
      "even": "even",
      "affine": "[k for k in jax.tree_util.tree_leaves_with_path(small_params) if 'norm2' in str(k[0])]",
    },
  )
  assert len(found["accuracy"]) == 6 and min(found["accuracy"].values()) > 0.3
  tokens, width, hidden, blocks = 64, 64, 64, 2
  expected = tokens * 48 * width + width * 10
  expected += blocks * (2 * tokens * hidden * width + 2 * tokens * width * 2 * width)
  # Beside two for each multiply-add, XLA counts one for each number of anything else.
  assert 2 * expected < found["mixer"] < 2.4 * expected
  assert found["difference"] < 1e-4 and found["agree"] == 1.0 and found["affine"] == []
  # The share of 4,096 random weights within 3 patches is that of even ones but for 3% of it.
  assert found["locality"][-1][3] > 1.1 * found["even"][3]


@pytest.mark.slow
def test_finetune_b16_s_results(tmp_path):
  """Offline: fine-tuning from the file that was made beats training from scratch."""
  found = execute(
    "finetune_b16",
    tmp_path,
    {
      "full": "FULL",
      "pretrained": "row['test/top1']",
      "tuned": "[r['test/top1'] for r in tuned]",
      "scratch": "[[r['test/top1'] for r in rows] for rows in scratch.values()]",
      "classes": "[list(PRETRAIN), list(run.task.class_names)]",
      "same": "bool((weights.arrays['stem/kernel'] == np.load(source)['stem/kernel']).all())",
    },
  )
  assert found["full"] is False and found["same"]
  assert not set(found["classes"][0]) & set(found["classes"][1])
  assert max(found["tuned"]) > max(max(rows) for rows in found["scratch"]) + 0.05


@pytest.mark.slow
def test_text_s_results(tmp_path):
  """Words are found, matrices are nearer to Toeplitz ones than chance, both starts beat guessing."""
  found = execute(
    "text",
    tmp_path,
    {
      "same": "vocabulary.decode(ids)",
      "perplexity": "[row['test/perplexity'] for row in history['AdamW']]",
      "losses": "{name: rows[-1]['test/loss'] for name, rows in history.items()}",
      "steps": "{name: rows[-1]['step'] for name, rows in history.items()}",
      "words": "[[sum(w.values()) for w in answer['words']] for answer in filled]",
      "toeplitz": "toeplitz",
      "random": "random_share",
      "accuracy": "{name: rows[-1]['test/accuracy'] for name, rows in classifiers.items()}",
      "classes": "[answer['class'] for answer in answers]",
    },
  )
  assert found["same"] == "an unforgettable film , gorgeously photographed !"
  assert found["perplexity"][-1] < found["perplexity"][0] / 2 and found["perplexity"][-1] < 300
  assert len(set(found["steps"].values())) == 1 and len(found["losses"]) == 2
  assert all(loss < 5.7 for loss in found["losses"].values())
  assert [len(words) for words in found["words"]] == [2, 1]
  assert all(0.0 < p <= 1.0 for words in found["words"] for p in words)
  # The 127 means of diagonals of 4,096 random entries have 127 / 4,096 of their squares.
  assert found["random"] == pytest.approx(127 / 4096, rel=0.2)
  assert max(found["toeplitz"].values()) > 0.4
  # One standard error over 872 sentences is 1.7 points at most; 50.9% are positive.
  assert all(accuracy > 0.7 for accuracy in found["accuracy"].values())
  assert found["classes"][:2] == ["negative", "positive"]


@pytest.mark.slow
def test_operators_results(tmp_path):
  """All runs beat the answer 0 by far, on both grids; columns of attention are functions."""
  found = execute(
    "operators",
    tmp_path,
    {
      "errors": "{' '.join(pair): rows[-1]['test/relative_l2'] for pair, (*_, rows) in runs.items()}",
      "fine": "{' '.join(pair): rows[-1]['test_256/relative_l2'] for pair, (*_, rows) in runs.items()}",
      "steps": "[rows[-1]['step'] for *_, rows in runs.values()]",
      "differences": "[[block, value] for (block, _), value in differences.items()]",
      "pictures": "list(drawn)",
      "darcy": "[row['test/relative_l2'] for row in darcy_rows]",
    },
  )
  assert len(found["errors"]) == 4 and found["steps"] == [512] * 4
  assert all(error < 0.05 for error in found["errors"].values())
  for pair, error in found["fine"].items():
    assert error == pytest.approx(found["errors"][pair], rel=0.25)
  assert len(found["differences"]) == 6
  for block, value in found["differences"]:
    assert value < (1e-4 if block == "GalerkinBlock_0" else 0.1)
  assert sorted(found["pictures"]) == ["attention", "errors", "functions"]
  assert found["darcy"][-1] < min(0.15, found["darcy"][0])


@pytest.mark.slow
def test_physics_s_results(tmp_path):
  """Solutions are near those in closed form; the coefficients are found."""
  found = execute(
    "physics",
    tmp_path,
    {
      "errors": "{name: rows[-1][2] for name, (_, rows) in solved.items()}",
      # sin(pi / 2) sin(pi / 2) + exp(-1/4) at (1/4, 1/2)
      "value": "float(net(solved['Gauss-Newton'][0], jnp.array([0.25, 0.5])))",
      "dtype": "str(variables['params']['Dense_0']['kernel'].dtype)",
      "forward": "forward[-1]['test/relative_l2']",
      "pictures": "list(drawn)",
      "found": "[inverse[-1]['test/D'], inverse[-1]['test/r']]",
      "inverse": "inverse[-1]['test/relative_l2']",
      "true": "[D, R]",
      # The formula solves the equation, by central differences.
      "formula": """float((lambda f, x, t, h: abs((f(x, t + h) - f(x, t - h)) / (2 * h)
        - D * (f(x + h, t) - 2 * f(x, t) + f(x - h, t)) / h**2 - R * f(x, t) * (1 - f(x, t))))(
          lambda x, t: float(front(jnp.array([x, t]))), 0.3, 0.7, 1e-4))""",
    },
  )
  errors = found["errors"]
  assert errors["Gauss-Newton"] < 1e-4 < 1e-3 < errors["Adam"] < 0.05
  assert errors["Gauss-Newton"] < errors["K-FAC"] < errors["Adam"]
  assert found["value"] == pytest.approx(1 + math.exp(-0.25), abs=1e-4)
  assert found["dtype"] == "float64" and found["formula"] < 1e-6
  assert found["forward"] < 1e-4 and "solution" in found["pictures"]
  assert found["found"] == pytest.approx(found["true"], rel=0.1) and found["inverse"] < 0.05


@pytest.mark.slow
def test_translation_s_results(tmp_path):
  """Both models learn the toy pair; no place sees words after it."""
  found = execute(
    "translation",
    tmp_path,
    {
      "bleu": "{' '.join(map(str, key)): score for key, score in scores.items()}",
      "greedy": "{title: rows[-1]['test/bleu'] for title, rows in history.items()}",
      "answers": "[answer['translation'] for answer in answers]",
      "pictures": "list(drawn)",
      "difference": "[float(x) for x in difference[:length]]",
    },
  )
  assert len(found["bleu"]) == 8 and all(score > 80 for score in found["bleu"].values())
  for title, score in found["greedy"].items():
    assert found["bleu"][f"{title} latest 1"] == pytest.approx(score, abs=1e-6)
  assert found["answers"][0] == "Morgen verstecken zwei alte Lehrer die Bücher."
  assert found["answers"][1] == "Zeichnet die junge Ärztin diesen Apfel?"
  assert len(found["answers"]) == 3 and found["answers"][2]
  assert found["pictures"] == ["encoder", "decoder", "cross_attention"]
  assert set(found["difference"][:5]) == {0.0} and min(found["difference"][5:]) > 0.1


@pytest.mark.slow
def test_recipes_results(tmp_path):
  """One student agrees more and more with a better teacher; no collapse; shapes are found."""
  found = execute(
    "recipes",
    tmp_path,
    {
      "teacher": "metrics_file.read(directory / 'teacher')[-1]['test/top1']",
      "told": "history['labels and teacher'][-1]['test/teacher_top1']",
      "agreement": "[row['train/agreement'] for row in history['labels and teacher']]",
      "top1": "{name: rows_[-1]['test/top1'] for name, rows_ in history.items()}",
      "knn": "[untrained['knn'], *(row['test/knn'] for row in rows)]",
      "entropy": "[row['train/teacher_entropy'] for row in rows]",
      "starts": "{name: rows_[-1]['test/top1'] for name, rows_ in starts.items()}",
      "miou": "[row['test/miou'] for row in pixels]",
      "pictures": "list(drawn)",
    },
  )
  assert found["teacher"] == pytest.approx(found["told"], abs=1e-6) and found["told"] > 0.42
  assert found["told"] > found["top1"]["labels alone"] + 0.03
  assert found["agreement"][-1] > max(0.4, found["agreement"][0])
  assert all(top1 > 0.32 for top1 in found["top1"].values())
  # One standard error over 1,000 images is 1.5 points; log(512) is 6.2.
  assert found["knn"][-1] > 0.2 and all(0.5 < entropy < 6 for entropy in found["entropy"])
  assert found["starts"]["trained"] > found["starts"]["frozen"] > 0.18
  assert found["miou"][-1] > found["miou"][0] > 0.1 and "masks" in found["pictures"]
