"""Every command in the documents is one that its program takes; files and fields exist."""

import configparser
import importlib.util
import json
import re
import subprocess
import sys
import tomllib

import pytest

from results import tables
from tests.docs.commands import NEEDS, PAGES, ROOT, arguments, blocks, inline

# Values for placeholders that cannot be parsed as they are.
EXAMPLES = {
  "--study=FILE": "--study=configs/studies/frontier.py",
  "STUDY.py:RUN": "configs/studies/small.py:mini8-sgd-seed0",
  "--num_processes=N --process_id=I": "--num_processes=2 --process_id=0",
}


def commands(tmp_path):
  """(page, words) of every command of every page."""
  found = []
  for page in PAGES:
    for i, block in enumerate(blocks(page) + inline(page)):
      for placeholder, example in EXAMPLES.items():
        block = block._replace(text=block.text.replace(placeholder, example))
      directory = tmp_path / f"{page.replace('/', '-')}-{i}"
      directory.mkdir()
      words = arguments(block, directory)
      assert words, f"{page}: nothing runs in {block.text!r}"
      found += [(page, command) for command in words]
  return found


def extras():
  setup = configparser.ConfigParser()
  setup.read(ROOT / "setup.cfg")
  return {f".[{name}]" for name in setup["options.extras_require"]} | {"."}


def wrong(command):
  """The fault of a command that is no module of the package or the benchmarks, or None."""
  match command:
    case ["python", "-m", "tests.colabs", "NAME"]:
      return None if (ROOT / "tests" / "colabs" / "__main__.py").exists() else "no such program"
    case ["python", "-m", "results", *options]:
      return None if set(options) <= {"--check", *tables.TABLES} else "no such table"
    case ["python", "-m", "tests.fuzz", *options]:
      known = all(re.fullmatch("--(cases|seed)=[0-9]+", option) for option in options)
      return None if known else "no such option"
    case ["python", "-m", "venv", _] | ["ruff", "format" | "check", "."]:
      return None
    case ["pip", "install", "-e", target, *others]:
      return None if target in extras() and set(others) <= {"ruff"} else "no such extra"
    case ["python", "-m", "pytest", *rest] | ["pytest", *rest]:
      return wrong_tests(rest)
    case ["python", "-m", module]:  # the name of a program in a sentence
      return None if importlib.util.find_spec(module) else "no such module"
    case ["python", script, *_] if not script.startswith("-"):
      return None if (ROOT / script).is_file() else "no such script"
  return "no test knows this command"


def wrong_tests(words):
  settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
  markers = {line.partition(":")[0] for line in settings.get("markers", ())}
  match words:
    case ["-m", marker, "-n", "0", "-s", *paths] | ["-m", marker, *paths] if marker in markers:
      pass
    case paths:
      pass
  return next((f"no {path}" for path in paths if not (ROOT / path).exists()), None)


WRONG = {
  "mixer_jax.main --config=configs/none.py": "none.py",
  "mixer_jax.main --config=configs/quickstart.py --config.optimiser.damping=1": "optimiser",
  "mixer_jax.main --config=configs/quickstart.py:kfac --config.optimizer.b1=0.5": "b1 is no option",
  "mixer_jax.main --config=configs/quickstart.py:kfac --config.optimizer.damping=-1": "damping is -1",
  "mixer_jax.main --config=configs/quickstart.py --config.model.name=mixer": "'mixer'",
  "mixer_jax.main --config=configs/quickstart.py --config.model.pooling=average": "pooling",
  "mixer_jax.main --config=configs/quickstart.py --work=DIR": "work",
  "mixer_jax.main --config=configs/kfac_cifar10.py:b16_pt": "pretrained",
  "mixer_jax.evaluate --workdir=DIR cat.jpg": "cat.jpg",
  "mixer_jax.report curve --workdir=DIR": "curve",
  "benchmarks trains": "trains",
  "benchmarks train --models=mixer_b17": "mixer_b17",
  "mixer_jax.study --study=configs/studies/small.py --workdir=D --run=none": "none",
  "mixer_jax.study --study=configs/studies/small.py --workdir=D --set=data.dirs=F": "dirs",
}


def is_parsed(words):
  module = words[2] if words[:2] == ["python", "-m"] and len(words) > 3 else ""
  return module.startswith("mixer_jax.") or module == "benchmarks"


@pytest.fixture(scope="module")
def parsed(tmp_path_factory):
  """Verdicts of the parser: on the commands found, by (page, words), and on `WRONG`."""
  found = commands(tmp_path_factory.mktemp("pages"))
  ours = [c for c in found if is_parsed(c[1])]
  result = subprocess.run(
    [sys.executable, "-m", "tests.docs.parse"],
    input=json.dumps([words[2:] for _, words in ours] + [c.split() for c in WRONG]),
    capture_output=True,
    text=True,
    cwd=ROOT,
    timeout=600,
  )
  assert result.returncode == 0, result.stderr[-2000:]
  verdicts = json.loads(result.stdout)
  others = [(c, wrong(c[1])) for c in found if c not in ours]
  mine, theirs = verdicts[: len(ours)], verdicts[len(ours) :]
  return [*zip(ours, mine), *others], dict(zip(WRONG, theirs, strict=True))


@pytest.mark.thorough
def test_every_command_is_understood(parsed):
  verdicts, _ = parsed
  ours = [page for (page, words), _ in verdicts if is_parsed(words)]
  assert len(ours) > 40 and {"README.md", "docs/study.md", "docs/scaling.md"} <= set(ours)
  problems = [f"{page}: {' '.join(words)}: {why}" for (page, words), why in verdicts if why]
  assert not problems, "\n".join(problems)


@pytest.mark.thorough
def test_wrong_commands_are_found(parsed):
  _, verdicts = parsed
  assert not {c: said for c, said in verdicts.items() if WRONG[c] not in (said or "")}


def test_marks_are_known():
  assert {need for page in PAGES for b in blocks(page) for need in b.needs} <= set(NEEDS)
