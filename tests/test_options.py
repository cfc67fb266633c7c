"""Options: made from signatures, checked, and tabulated."""

import dataclasses
import functools
from typing import Annotated

import flax.linen as nn
import pytest

from mixer_jax import options
from mixer_jax.errors import UserError
from mixer_jax.options import Option


def inner(
  *, size: Annotated[int, Option("a size", 1, 9)] = 3, rate: Annotated[float, Option("r")] = 1.0
):
  return size, rate


def outer(first, *, rate: Annotated[float, Option("another", 0)] = 0.5):
  return first, rate


@dataclasses.dataclass(frozen=True)
class Fields:
  needed: Annotated[int, Option("has no default", 0)]
  start: Annotated[int | None, Option("may be None", 0)] = None
  form: Annotated[str, Option("text", choices=("", "square"))] = ""
  plain: int = 0


class Module(nn.Module):
  width: Annotated[int, Option("units", 1)] = 4


def test_options_are_made_from_signatures():
  found = options.of(outer)
  assert {k: (o.name, o.type, o.default) for k, o in found.items()} == {
    "rate": ("rate", float, 0.5)
  }
  assert list(options.of(Fields)) == ["needed", "start", "form"]
  assert options.of(Fields)["needed"].default is options.REQUIRED
  assert (options.of(Fields)["start"].optional, options.of(Fields)["start"].type) == (True, int)
  assert options.of(Module)["width"].default == 4
  assert options.of(functools.partial(Module, width=7))["width"].default == 7


def test_annotations_may_be_texts():
  """As `from __future__ import annotations` makes them."""
  scope = dict(Annotated=Annotated, Option=Option)
  code = "from __future__ import annotations\ndef f(*, a: Annotated[int | None, Option('a', 1)] = 2): pass"
  exec(code, scope)
  option = options.of(scope["f"])["a"]
  assert (option.type, option.default, option.low, option.optional) == (int, 2, 1, True)


def test_a_group_has_the_defaults_and_hands_on_set_fields():
  config = options.group(Fields, form="square")
  assert config.to_dict() == dict(needed=None, start=None, form="square")
  assert options.given(config) == dict(form="square")
  several = {"one": inner, "two": functools.partial(outer, 1)}
  config = options.group(several, "one", size=5)
  assert config.to_dict() == dict(name="one", size=5, rate=None)
  assert options.given(config) == dict(size=5)
  assert options.value(several, config, "rate") == 1.0
  assert options.value(several, config, "size") == 5
  with config.ignore_type():
    config.rate = [1, 2]  # as JSON has tuples
  assert options.given(config)["rate"] == (1, 2)


def sized(*, length: Annotated[tuple[float, ...], Option("of three", 0, 1, length=3)] = (0, 0, 0)):
  return length


def message(config, made_of, **also):
  with pytest.raises(UserError) as caught:
    options.check(config, made_of, "group", **also)
  return str(caught.value)


def test_a_group_is_checked_by_its_function():
  config = options.group(Fields)
  assert message(config, Fields).startswith("group.needed is None; allowed: ")
  config.needed = 1
  options.check(config, Fields, "group")
  config.start = 4
  options.check(config, Fields, "group")
  config.form = "round"
  assert message(config, Fields) == """group.form is 'round'; allowed: "", square"""
  config.update(form="", plain=1)
  assert message(config, Fields).startswith("group.plain is no field of a config; there are needed")
  del config.plain
  config.strat = 1
  assert message(config, Fields).endswith("; did you mean group.start?")


def test_a_group_of_several_takes_the_options_of_the_chosen_one():
  several = {"one": inner, "three": sized}
  also = {"common": Option("of all", 0, name="common", type=int, default=1)}
  config = options.group(several, "one", size=2)
  config.common = 1
  options.check(config, several, "group", also)
  config.common = -1
  assert message(config, several, also=also).startswith("group.common is -1")
  config.name = "tree"
  assert message(config, several) == "group.name is 'tree'; allowed: one, three"
  config = options.group(several, "one")
  config.length = (0, 0, 1)
  assert message(config, several).startswith("group.length is no option of one; there are size, ")
  config.name = "three"
  options.check(config, several, "group")
  config.length = (0, 1)
  assert message(config, several).startswith("group.length is (0, 1); allowed: a list of 3 numbers")


def test_a_table_tells_the_same_option_of_several_apart():
  assert options.table(Fields, "f.").splitlines()[2:] == [
    "| `f.needed` |  | 0 or more | has no default |",
    "| `f.start` | `None` | 0 or more | may be None |",
    "| `f.form` | `''` | \"\", square | text |",
  ]
  wide, wider = (functools.partial(Module, width=w) for w in (7, 8))
  several = options.table({"one": inner, "two": outer, "w": wide, "ww": wider}, "g.")
  assert several.splitlines()[2:] == [
    "| `g.name` |  |  | one, two, w, ww | chooses one with its defaults |",
    "| `g.size` | one | `3` | 1 to 9 | a size |",
    "| `g.rate` | one | `1.0` | a finite number | r |",
    "| `g.rate` | two | `0.5` | 0 or more | another |",
    "| `g.width` | Module | by name | 1 or more | units |",
  ]


def test_a_table_escapes_bars_and_marks_free_options():
  def function(*, pattern: Annotated[str, Option("a | b", free=True)] = "(x|y)"):
    return pattern

  [*_, row] = options.table(function, "").splitlines()
  assert row == r"| `pattern` | `'(x\|y)'` | text | a \| b (free) |"
