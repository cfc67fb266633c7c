"""What the site makes of the pages, without mkdocs."""

import csv

import pytest

from docs import site
from mixer_jax import config as config_lib
from tests.docs.commands import ROOT


def test_every_mark_of_a_page_is_filled_in():
  for path in ROOT.glob("docs/*.md"):
    assert "<!-- made" not in (text := site.filled(path.read_text())), path
    assert "<!-- table" not in text.replace("<!-- table: NAME", ""), path


def test_options_and_configs_are_all_there():
  options, configs = (
    site.filled((ROOT / "docs" / f"{name}.md").read_text()) for name in ("options", "configs")
  )
  flat = (f"`{name}`" for name in config_lib.default() if name != "data")
  assert not [name for name in flat if name not in options and name.strip("`") not in GROUPS]
  for path in ROOT.glob("configs/*.py"):
    assert f"| `{path.name}` |" in configs and f"--config=configs/{path.name}" in configs, path


GROUPS = {"model", "optimizer", "schedule", "mesh", "task"}


def test_a_config_s_result_is_its_row():
  with (ROOT / "results" / "configs.csv").open(newline="") as file:
    first = next(csv.DictReader(file))
  assert f"| `{first['model']}.py` |" in site.config_results()
  assert "| test top-1 [%] 58.1 ± 0.9 |" in site.config_results()


@pytest.mark.parametrize(
  "text, source, page, expected",
  [
    ("[a](text.md#b)", "docs/models.md", "models.md", "[a](text.md#b)"),
    ("[a](../CONTRIBUTING.md#b)", "docs/models.md", "models.md", "[a](contributing.md#b)"),
    ("[a](../configs/mlm.py)", "docs/text.md", "text.md", "[a](R/blob/main/configs/mlm.py)"),
    ("[a](../colabs/text.ipynb)", "docs/text.md", "text.md", "[a](colabs/text.ipynb)"),
    ("[a](own_task.py)", "docs/own_task.md", "own_task.md", "[a](R/blob/main/docs/own_task.py)"),
    ("[a](../text.md)", "docs/api/optim.md", "api/optim.md", "[a](../text.md)"),
    ("![a](docs/images/a.png)", "README.md", "index.md", "![a](images/a.png)"),
    ("[a](LICENSE) [b](#c)", "README.md", "index.md", "[a](R/blob/main/LICENSE) [b](#c)"),
    ("[a](https://x.org/y)", "README.md", "index.md", "[a](https://x.org/y)"),
  ],
)
def test_links_hold_on_the_site(text, source, page, expected):
  assert site.linked(text, source, page, "R") == expected


def test_the_readme_s_addresses_are_pages():
  text = f"[a]({site.ADDRESS}text/#b) ![c]({site.ADDRESS}images/c.png) [d](LICENSE)"
  assert site.local(text) == "[a](docs/text.md#b) ![c](docs/images/c.png) [d](LICENSE)"
