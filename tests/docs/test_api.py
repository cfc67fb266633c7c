"""The API reference shows what is public, and each of its examples runs as it stands."""

import re
import textwrap

import pytest

from mixer_jax import study
from mixer_jax.training import loop
from tests.docs import api
from tests.pretrained.test_bert import Peer

_FENCE = re.compile(r"^( *)```python\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_AFTER = re.compile(r"After the example of `(\w+)`:\n")
NAMES = dict.fromkeys([*api.public(), *api.shown()])


def example(name):
  """The code of a docstring's example, after that of the one that it names; "" without one."""
  text = name.doc.partition("\nExample:\n")[2]
  before = _AFTER.match(text.strip())
  code = [example(name._replace(name=before[1]))] if before else []
  return "\n".join([*code, *(textwrap.dedent(code) for _, code in _FENCE.findall(text))])


def test_pages_show_what_is_public():
  found = [name for name in api.shown() if "." not in name.name]
  assert sorted(found) == sorted(api.public())


def test_each_public_function_has_an_example():
  """Of a method that of its class is enough."""
  classes = {name for name in NAMES if example(name) and not name.is_function}
  lacking = [name for name in NAMES if name.is_function and not example(name)]
  own = lambda name: name._replace(name=name.name.partition(".")[0])
  assert not [name for name in lacking if own(name) not in classes]


def train_a_little(directory):
  """A run of the quickstart on few images."""
  config = study.read_config(api.ROOT / "configs/quickstart.py", "sgd")
  config.update(num_epochs=1, target=0.0)
  config.data.update(train_split="train[:64]", test_split="test[:64]")
  loop.train(config, directory)


def cases():
  for name in filter(example, NAMES):
    needs_run = "runs/first" in example(name)
    short = f"{name.package.removeprefix('mixer_jax.')}.{name.name}"
    yield pytest.param(name, id=short, marks=[pytest.mark.thorough] if needs_run else [])


@pytest.mark.parametrize("name", list(cases()))
def test_the_example_runs(name, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  code = example(name)
  for folder in ("configs", "docs"):
    (tmp_path / folder).symlink_to(api.ROOT / folder)
  if "bert_mini" in code:
    (tmp_path / "bert_mini").mkdir()
    Peer(tmp_path / "bert_mini")
  if "runs/first" in code:
    train_a_little("runs/first")
  exec(compile(code, "<example>", "exec"), {"__name__": "__main__"})
