"""Options that name parameters by regular expressions of their paths, or take one of some names."""

import math
import re
from typing import Any, Mapping, Sequence


def matching(option: str, given: str | Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
  """The regular expressions of an option; a ValueError for one that matches no parameter."""
  patterns = ((given,) if given else ()) if isinstance(given, str) else tuple(given)
  for pattern in patterns:
    if names and not any(re.search(pattern, name) for name in names):
      raise ValueError(
        f"{option} is {pattern!r}, which matches no parameter; they are {', '.join(names)}"
      )
  return patterns


def matches(patterns: Sequence[str], name: str) -> bool:
  """Whether one of the regular expressions is found in a parameter's path."""
  return any(re.search(pattern, name) for pattern in patterns)


def limit(max_factor: Any, paths: Sequence[str]) -> float:
  """The largest factor of a layer: a number, None for infinity, or by the first pattern that matches."""
  if isinstance(max_factor, Mapping):
    found = (n for pattern, n in max_factor.items() if any(matches((pattern,), p) for p in paths))
    max_factor = next(found, None)
  return math.inf if max_factor is None else max_factor


def check_choice(option: str, value: str, allowed: Sequence[str]) -> None:
  """Raises a ValueError if an option is none of the allowed names."""
  if value not in allowed:
    raise ValueError(f"{option} is {value!r}; allowed: {', '.join(allowed)}")
