"""What mkdocs makes of these pages: options, configs, tables and links, when the site is built.

  <!-- table: NAME -->   a table of results/tables.py
  <!-- made: NAME -->    the text of a function of `MADE`
  [text](../FILE)        the page of a file that the site shows, else the file in the repository

The README, which the package index shows, too, has the site's own addresses.
"""

import ast
import collections
import os
import pathlib
import re

from mixer_jax import config as config_lib
from mixer_jax import pretrained
from mixer_jax.pretrained import catalog
from mixer_jax.report import settings
from mixer_jax.study import plan
from results import markdown, rows, tables

ROOT = pathlib.Path(__file__).parent.parent
ADDRESS = "https://mixer-jax.github.io/mixer_jax/"
# Files outside of docs/ that are pages, by their names on the site.
PAGES = {
  "index.md": "README.md",
  "changelog.md": "CHANGELOG.md",
  "contributing.md": "CONTRIBUTING.md",
}
PAGES |= {"measurements.md": "results/README.md"}
PAGES |= {f"colabs/{path.name}": f"colabs/{path.name}" for path in ROOT.glob("colabs/*.ipynb")}

_MARK = re.compile(r"^<!-- (table|made): (\S+) -->(\n\n(?:\|.*\n)+\n<!-- end -->)?", re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)#\s]+)")


def config_files() -> str:
  """The docstring of each config, which has its command and its arguments."""
  files = sorted(ROOT.glob("configs/*.py"))
  docs = {path.stem: ast.get_docstring(ast.parse(path.read_text())) for path in files}
  return "\n\n".join(f"### {name}\n\n```text\n{doc}\n```" for name, doc in docs.items())


def config_results() -> str:
  """The run of each config that is nearest to the file as it stands."""
  found = collections.defaultdict(dict)
  for row in rows.read("configs"):
    found[row["model"]].setdefault(row["metric"].replace(" mean", ""), []).append(row)
  lines = ["| config | differs from the file | result | seeds | commit |", "| :-- " * 5 + "|"]
  for name, metrics in found.items():
    (metric, (first, *_)), *deviation = metrics.items()
    value = " ± ".join([first["value"], *(rest[0]["value"] for _, rest in deviation)])
    differs = ", ".join(filter(None, (first["data"], first.get("differs", ""))))
    cells = f"`{name}.py`", differs or "-", f"{metric} {value}", first["seed"], first["commit"]
    lines.append(f"| {' | '.join(cells)} |")
  return "\n".join(lines)


def studies() -> str:
  """The first line of each study's docstring, and the number of its runs."""
  lines = ["| `configs/studies/` | runs | content |", "| :-- | --: | :-- |"]
  for path in sorted(ROOT.glob("configs/studies/*.py")):
    doc, _, _ = ast.get_docstring(ast.parse(path.read_text())).partition("\n")
    lines.append(f"| `{path.name}` | {len(plan.load(str(path)).runs())} | {doc} |")
  return "\n".join(lines)


def weights() -> str:
  """The public files by name, with what a config needs to know of each."""
  half, zero = catalog.MINUS_ONE_TO_ONE, catalog.ZERO_TO_ONE
  pixels = {catalog.IMAGENET: "ImageNet", half: "half", zero: "[0, 1]"}
  lines = [
    "| name for `--config.pretrained` | model | classes | pixels |",
    "| :-- | :-- | --: | :-- |",
  ]
  for name, entry in pretrained.CATALOG.items():
    fields = "".join(f", `model.{key}={value}`" for key, value in entry.overrides.items())
    known = f"{entry.num_classes:,} | {pixels[entry.normalization]}"
    lines.append(f"| `{name}` | `{entry.model}`{fields} | {known} |")
  return "\n".join(lines)


MADE = {
  "options": config_lib.table,
  "configs": lambda: settings.of_all(ROOT / "configs"),
  "config_files": config_files,
  "config_results": config_results,
  "studies": studies,
  "weights": weights,
}


def filled(text: str) -> str:
  """A page with what its marks stand for."""

  def made(match: re.Match) -> str:
    kind, name = match[1], match[2]
    return MADE[name]() if kind == "made" else markdown.of(tables.TABLES[name])

  return _MARK.sub(made, text)


def local(text: str) -> str:
  """The README with links to files instead of addresses of the site."""
  text = re.sub(rf"\({ADDRESS}([\w/]+)/(?=[)#])", r"(docs/\1.md", text)
  return text.replace(f"({ADDRESS}", "(docs/")


def linked(text: str, source: str, page: str, repository: str) -> str:
  """A page with links that hold on the site.

  Args:
    text: of the page.
    source: its file, from the root of the repository; links in it start there.
    page: its name on the site.
    repository: address of the files that are no pages.
  """
  names = {file: name for name, file in PAGES.items()}

  def link(match: re.Match) -> str:
    file = os.path.normpath(os.path.join(os.path.dirname(source), match[1]))
    inside = file.removeprefix("docs/") if file.startswith("docs/") else names.get(file)
    if inside and not inside.endswith(".py"):
      return os.path.relpath(inside, os.path.dirname(page) or ".")
    return f"{repository}/blob/main/{file}"

  return _LINK.sub(link, text)


def on_files(files, config):
  """Adds the pages that are files of other folders."""
  from mkdocs.structure.files import File  # tests fill pages without it

  for name, file in PAGES.items():
    if name == file:  # mkdocs-jupyter reads notebooks from their place
      files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    else:
      files.append(File.generated(config, name, content=(ROOT / file).read_text()))
  return files


on_files.mkdocs_priority = 100  # before the plugin that looks for notebooks


def on_page_markdown(text, page, config, files):
  """Fills in tables and mends links."""
  source = PAGES.get(page.file.src_uri, f"docs/{page.file.src_uri}")
  return linked(filled(local(text)), source, page.file.src_uri, config.repo_url.rstrip("/"))
