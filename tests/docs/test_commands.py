"""Every command in the documents is one that its program takes; files and fields exist."""

import configparser
import json
import re
import subprocess
import sys

import pytest

from tests.docs.commands import PAGES, ROOT, arguments, blocks, inline

# Values for placeholders that cannot be parsed as they are.
EXAMPLES = {
  "--study=FILE": "--study=configs/studies/frontier.py",
  "STUDY.py:RUN": "configs/studies/small.py:mini8-sgd-seed0",
  "--num_processes=N --process_id=I": "--num_processes=2 --process_id=0",
  "--config=FILE:ARG": "--config=configs/quickstart.py:sgd",
  "transfer.py:folder,NAME": "transfer.py:folder,mixer_b16",
}
# Commands of other programs, whose files and extras exist.
OTHERS = (
  r"python -m tests\.colabs NAME",
  r"python -m results( --check| \w+)?",
  r"python -m tests\.fuzz( --(cases|seed)=\d+)*",
  r"python -m venv \S+",
  r"ruff (format|check) \.",
  r"pip install -e \.(?P<extra>\[[\w,]+\])?",
  r"pyright",
  r"(python -m )?pytest( -m (slow|thorough))?( -n 0 -s)?( tests/\S+)*",
  r"python (?P<script>\S+\.py).*",
  r"python -m (mixer_jax|benchmarks)\S*",
  r"python -m big_vision\.train .*",
)
WRONG = {
  "mixer_jax.main --config=configs/none.py": "none.py",
  "mixer_jax.main --config=configs/quickstart.py --config.optimiser.damping=1": "optimiser",
  "mixer_jax.main --config=configs/quickstart.py:kfac --config.optimizer.b1=0.5": "b1 is no option",
  "mixer_jax.main --config=configs/quickstart.py --config.model.name=mixer": "'mixer'",
  "mixer_jax.main --config=configs/quickstart.py --work=DIR": "work",
  "mixer_jax.evaluate --workdir=DIR cat.jpg": "cat.jpg",
  "mixer_jax.report curve --workdir=DIR": "curve",
  "mixer_jax.report rows --workdir=DIR --metric=loss": "rows takes none",
  "benchmarks train --models=mixer_b17": "mixer_b17",
  "mixer_jax.study --study=configs/studies/small.py --workdir=D --run=none": "none",
  "mixer_jax.study --study=configs/studies/small.py --workdir=D --set=data.dirs=F": "dirs",
}


def commands(tmp_path):
  """(page, words) of every command of every page."""
  for page in PAGES:
    for i, block in enumerate(blocks(page) + inline(page)):
      for placeholder, example in EXAMPLES.items():
        block = block._replace(text=block.text.replace(placeholder, example))
      directory = tmp_path / f"{page.replace('/', '-')}-{i}"
      directory.mkdir()
      words = arguments(block, directory)
      assert words, f"{page}: nothing runs in {block.text!r}"
      yield from ((page, command) for command in words)


def wrong(words):
  """The fault of a command of another program, or None."""
  found = next(filter(None, (re.fullmatch(form, " ".join(words)) for form in OTHERS)), None)
  if not found:
    return "no test knows this command"
  named = found.groupdict()
  setup = configparser.ConfigParser()
  setup.read(ROOT / "setup.cfg")
  extras = (named.get("extra") or "").strip("[]").split(",")
  if not {x for x in extras if x} <= set(setup["options.extras_require"]):
    return "no such extra"
  files = [named.get("script") or "", *(word for word in words if word.startswith("tests/"))]
  return next((f"no {file}" for file in files if not (ROOT / file).exists()), None)


def is_ours(words):
  module = words[2] if words[:2] == ["python", "-m"] and len(words) > 3 else ""
  return module.startswith("mixer_jax.") or module == "benchmarks"


@pytest.mark.thorough
def test_every_command_is_understood_and_wrong_ones_are_found(tmp_path):
  found = list(commands(tmp_path))
  ours = [c for c in found if is_ours(c[1])]
  assert len(ours) > 40 and {"README.md", "docs/studies.md", "docs/devices.md"} <= {
    p for p, _ in ours
  }
  result = subprocess.run(
    [sys.executable, "-m", "tests.docs.parse"],
    input=json.dumps([words[2:] for _, words in ours] + [c.split() for c in WRONG]),
    capture_output=True,
    text=True,
    cwd=ROOT,
    timeout=600,
  )
  assert result.returncode == 0, result.stderr[-2000:]
  said = json.loads(result.stdout)
  verdicts = [*zip(ours, said), *((c, wrong(c[1])) for c in found if c not in ours)]
  problems = [f"{page}: {' '.join(words)}: {why}" for (page, words), why in verdicts if why]
  assert not problems, "\n".join(problems)
  missed = {c: why for c, why in zip(WRONG, said[len(ours) :]) if WRONG[c] not in (why or "")}
  assert not missed
