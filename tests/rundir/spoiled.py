"""Spoiled files that runs and studies keep of themselves: each is refused in one line."""

import pytest

from mixer_jax.errors import UserError

# What no record may hold, whichever it is.
NONSENSE = ["", "{", "null", "3", '"text"', "[]", "[1]", "{}", '{"a": {"b": 1}}', "[" * 10**5,
            "\x00", '{"a.b": 1}', "NaN"]  # fmt: skip


def line_of(function, *args):
  """The line of the UserError that a call raises."""
  with pytest.raises(UserError) as info:
    function(*args)
  line = str(info.value)
  assert "\n" not in line and len(line) < 2000
  return line
