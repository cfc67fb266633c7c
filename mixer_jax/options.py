"""Options: name, type, default, range and help, stated once, beside the code that takes them.

A keyword of a function, or a field of a dataclass, becomes an option by its annotation:

  def sgd(learning_rate, *, momentum: Annotated[float, Option("decay of it", 0, 1)] = 0.9):

Groups of a config, their checks, their messages and their table in the docs are made from these.
"""

import dataclasses
import difflib
import functools
import inspect
import math
import types
import typing
from typing import TYPE_CHECKING, Annotated, Any, Callable, Iterable, Mapping, TypeVar

import numpy as np

from mixer_jax.errors import UserError

if TYPE_CHECKING:
  from ml_collections import ConfigDict

__all__ = ("Option", "one_of")
_FEW = 16  # names that a message lists all

_SET_BY_FILE = (
  ". If the config file sets it, take another argument of the file (as quickstart.py:sgd),"
  " or a file of your own"
)

Group = Callable | Mapping[str, Callable]
T = TypeVar("T")


Size = int | tuple[int, ...]  # a side, or height and width: the type of an option of both


def pair(size: Size) -> tuple[int, int]:
  """Height and width of a size."""
  height, width = (size, size) if isinstance(size, int) else size
  return height, width


def as_size(sides: tuple[int, int]) -> Size:
  """The inverse of `pair`, a side where both are one."""
  height, width = sides
  return height if height == width else (height, width)


def python_number(value: Any) -> Any:
  """A NumPy number as Python's; any other value as it is."""
  return value.item() if isinstance(value, np.generic) else value


@dataclasses.dataclass(frozen=True)
class Option:
  """One option of a config, the annotation of a keyword or field, with its help and range.

  The name, type and default are those of the keyword.

  Attributes:
    help: what the option means, one line.
    low: lowest value, allowed.
    high: highest value, allowed.
    choices: all allowed values; () if a range, or any text, is meant.
    length: length of a tuple; 0: any.
    free: whether it may differ when a run is resumed, since results do not depend on it.
    name: filled in from the keyword.
    type: filled in from the annotation: bool, int, float, str, tuple (of numbers) or object (of a
      `Size`).
    default: filled in from the keyword.
    optional: filled in: whether None is a value, too.

  Example:
    ```python
    import dataclasses
    from typing import Annotated

    from mixer_jax.options import Option

    @dataclasses.dataclass(frozen=True)
    class Waves:
      points: Annotated[int, Option("points of the grid", 8, 10**4)] = 32
    ```
  """

  help: str
  low: float = -math.inf
  high: float = math.inf
  choices: tuple[Any, ...] = ()
  length: int = 0
  free: bool = False
  name: str = ""
  type: type = str
  default: Any = None  # `REQUIRED` if there is none
  optional: bool = False

  def __repr__(self) -> str:  # `help` of a function shows one for each keyword
    return f"Option({self.help!r})"

  @property
  def allowed(self) -> str:
    """The values that the option takes, in words."""
    if self.choices:
      return ", ".join(str(choice) or '""' for choice in self.choices)
    numbers = f"a list of {self.length or 'any'} numbers, each " if self.type is tuple else ""
    numbers = "a side, or height and width as (H,W), each " if self.type is object else numbers
    if self.low == -math.inf:
      return _KINDS[self.type]
    if self.high == math.inf:
      return f"{numbers}{self.low:.10g} or more"
    return f"{numbers}{self.low:.10g} to {self.high:.10g}"

  def check(self, path: str, value: Any) -> None:
    """Raises a UserError that names the field if it does not take a value."""
    if value is None and self.optional:
      return
    size = self.type is object
    try:
      values = pair(value) if size else value if self.type is tuple else (value,)
      fits = value is not None and self.length in (0, len(values))
      fits = fits and not (size and any(type(v) is not int for v in values))
      if self.choices:
        fits = fits and value in self.choices
      elif self.type not in (str, bool):
        fits = fits and all(self.low <= v <= self.high and math.isfinite(v) for v in values)
    except (TypeError, ValueError):  # of a value that has no order or another length
      fits = False
    if not fits:
      raise UserError(f"{path} is {shown(value)}; allowed: {self.allowed}")


def one_of(help: str, choices: tuple[str, ...], **fields: Any) -> Any:
  """Returns the type of an option that takes one of several names.

  Args:
    help: what the option means, one line.
    choices: the allowed names.
    **fields: other attributes of the `Option`.

  Returns:
    An annotation.

  Example:
    ```python
    import dataclasses

    from mixer_jax.options import one_of

    @dataclasses.dataclass(frozen=True)
    class Net:
      activation: one_of("activation of the hidden layers", ("tanh", "sine")) = "tanh"
    ```
  """
  return Annotated[str, Option(help, choices=choices, **fields)]


REQUIRED = inspect.Parameter.empty
_KINDS = {
  bool: "True or False",
  int: "an integer",
  float: "a finite number",
  str: "text",
  tuple: "a list of finite numbers",
}


@functools.cache
def of(function: Callable) -> Mapping[str, Option]:
  """The options of a function, a class or a partial application of one, by name."""
  found = {}
  for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
    for note in getattr(parameter.annotation, "__metadata__", ()):
      if isinstance(note, Option):
        kind = typing.get_args(parameter.annotation)[0]
        kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
        if optional := type(None) in kinds:
          kinds = tuple(t for t in kinds if t is not type(None))
        kind = kinds[0] if len(kinds) == 1 else object
        seen = dict(name=name, default=parameter.default, optional=optional)
        found[name] = dataclasses.replace(note, type=typing.get_origin(kind) or kind, **seen)
  return types.MappingProxyType(found)


def group(made_of: Group, /, name: str = "", **values: Any) -> "ConfigDict":
  """A group of a config: the defaults but for some values.

  It is made of a function or class with options; or of several by name, and the field `name`
  chooses one. Then fields that are None take the defaults of the chosen one.
  """
  from ml_collections import ConfigDict, FieldReference  # late: models have options, and no config

  several = isinstance(made_of, Mapping)
  values |= {"name": name} if name else {}
  config = ConfigDict({"name": name} if several else {})
  for option in any_of(made_of).values():
    missing = several or option.default is None or option.default is REQUIRED
    default = None if missing else option.default
    anything = missing or option.type is object
    config[option.name] = FieldReference(default, option.type) if anything else default
  config.update(values)
  return config


def any_of(made_of: Group) -> dict[str, Option]:
  """The options of a group, whatever its name chooses."""
  functions = made_of.values() if isinstance(made_of, Mapping) else (made_of,)
  return {k: option for function in functions for k, option in of(function).items()}


def given(config: "ConfigDict") -> dict[str, Any]:
  """The set fields of a group but for its name: keywords of its function."""
  return {
    name: tuple(value) if isinstance(value, list) else value
    for name, value in config.items()
    if value is not None and name != "name"
  }


def made(made_of: Callable[..., T], config: "ConfigDict") -> T:
  """The dataclass of a group's set fields, with the group's name if the dataclass has a name."""
  name = {"name": config.name} if "name" in of(made_of) else {}
  return made_of(**given(config) | name)


def value(made_of: Mapping[str, Callable], config: "ConfigDict", field: str) -> Any:
  """A field of a group that has a name: as set, or the default of the chosen function."""
  own = config.get(field)
  return of(made_of[config.name])[field].default if own is None else own


def check(
  config: Mapping[str, Any],
  made_of: Group,
  path: str,
  also: Mapping[str, Option] = types.MappingProxyType({}),
  also_named: Iterable[str] = (),
) -> None:
  """Checks the names and values of a group's fields (see `group`).

  Args:
    config: the group.
    made_of: the function or class of the group, or several by name.
    path: of the group in the whole config, for messages.
    also: further options of the group.
    also_named: further names that a misspelt field may have meant.

  Raises:
    UserError: the first field that is unknown or takes another value.
  """
  several, prefix = isinstance(made_of, Mapping), f"{path}." if path else ""
  known = {**also, **of(chosen(config, made_of, path) if several else made_of)}
  for name, its_value in config.items():
    option = known.get(name)
    if several and (name == "name" or (its_value is None and name not in also)):
      continue  # None stands for the default of the entry, or the field is of another entry
    if option is None:
      noun = f"option of {config['name']}" if several else "field of a config"
      close = difflib.get_close_matches(name, [*known, *also_named], n=1)
      meant = f"; did you mean {prefix}{close[0]}?" if close else ""
      there = f"there are {', '.join(known)}" if known else "there are none with an Option"
      hint = _SET_BY_FILE if several else ""
      raise UserError(f"{prefix}{name} is no {noun}; {there}{meant}{hint}")
    if its_value is not None or option.default is not None:
      option.check(f"{prefix}{name}", its_value)


def chosen(config: Mapping[str, Any], made_of: Mapping[str, Callable], path: str) -> Callable:
  """The function that a group's name chooses; a UserError if there is none."""
  if (name := config.get("name")) not in made_of:
    raise UserError(f"{path}.name is {shown(name)}; {allowed_names(name, made_of)}")
  return made_of[name]


def allowed_names(given: Any, names: Iterable[str]) -> str:
  """The allowed names for a message; of many, those near to the given one, if there are any."""
  names = list(names)
  close = difflib.get_close_matches(str(given), names, n=3) if len(names) > _FEW else ()
  if close:
    return f"did you mean {', '.join(close)}? allowed: {len(names)} names"
  return f"allowed: {', '.join(names)}"


def shown(value: Any) -> str:
  """A value for a message: one line, not too long."""
  text = " ".join(repr(value).split())
  return text if len(text) <= 80 else f"{text[:77]}..."


def table(made_of: Group, path: str) -> str:
  """The options of a group as a Markdown table; of several by name with those that have a field."""
  several = isinstance(made_of, Mapping)
  called = {function: name for name, function in (made_of.items() if several else ())}
  # A partial application, as of a model's variant, is called by its class.
  label = lambda f: f.func.__name__ if hasattr(f, "func") else called.get(f) or f.__name__
  rows = [["field", "of", "default", "allowed", "meaning"], [":--"] * 5]
  if several:
    rows.append([f"`{path}name`", "", "", ", ".join(made_of), "chooses one with its defaults"])
  for name in any_of(made_of):
    owners: dict[tuple[str, str], list[Callable]] = {}  # by what the field takes and means there
    for function in made_of.values() if several else (made_of,):
      if option := of(function).get(name):
        meaning = option.allowed, option.help + (" (free)" if option.free else "")
        owners.setdefault(meaning, []).append(function)
    for meaning, functions in owners.items():
      owned = dict.fromkeys(map(label, functions if len(functions) < len(called) else ()))
      defaults: dict[str, dict[str, None]] = {}
      for function in functions:
        default = of(function)[name].default
        text = "" if default is REQUIRED else f"`{default!r}`"
        defaults.setdefault(text, {})[label(function)] = None
      default = "; ".join(f"{text} {', '.join(names)}" for text, names in defaults.items())
      if len(defaults) == 1:
        [default] = defaults
      elif len(set().union(*defaults.values())) < sum(map(len, defaults.values())):
        default = "by name"  # variants of one class differ
      rows.append([f"`{path}{name}`", ", ".join(owned), default, *meaning])
  cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
  return "\n".join(f"| {' | '.join(row if several else row[:1] + row[2:])} |" for row in cells)
