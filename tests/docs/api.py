"""The public names, and the pages of the API reference that show them."""

import importlib
import inspect
import pathlib
import re
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).parent.parent.parent
PACKAGES = ["mixer_jax"]
PACKAGES += [
  f"mixer_jax.{x}" for x in ("optim", "models", "pretrained", "config", "tasks", "study")
]
PACKAGES += [f"mixer_jax.{x}" for x in ("data.dataset", "options", "errors", "tasks.physics")]
_DIRECTIVE = re.compile(
  r"^::: (\S+)(?:\n +options: *\{?(?:\n +)?members: \[(.*?)\])?", re.MULTILINE
)


class Name(NamedTuple):
  """A public name of a package, or "Class.method" of one."""

  package: str
  name: str

  @property
  def object(self) -> Any:
    found = importlib.import_module(self.package)
    for part in self.name.split("."):
      found = getattr(found, part)
    return found

  @property
  def is_function(self) -> bool:
    return inspect.isroutine(self.object)

  @property
  def doc(self) -> str:
    """The docstring; "" of a constant, which has that of its class."""
    documented = self.is_function or isinstance(self.object, type | property)
    return inspect.getdoc(self.object) or "" if documented else ""


def public() -> list[Name]:
  """What `__all__` of each package lists."""
  return [Name(x, name) for x in PACKAGES for name in importlib.import_module(x).__all__]


def is_module(path: str) -> bool:
  return (ROOT / path.replace(".", "/")).with_suffix(".py").exists()


def shown() -> list[Name]:
  """What the pages show: public names, and the members of classes that a page lists."""
  found = []
  for page in sorted((ROOT / "docs/api").glob("*.md")):
    for path, members in _DIRECTIVE.findall(page.read_text()):
      package, _, name = path.rpartition(".")
      # Where a module has the name, too, the site has to be told the module that defines it.
      assert not is_module(path), path
      package = package if package in PACKAGES else package.rpartition(".")[0]
      found.append(Name(package, name))
      found += [Name(package, f"{name}.{x}") for x in re.findall(r"\w+", members)]
  return found
