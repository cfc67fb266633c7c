"""TFDS-style split strings for every source: "train", "train[:90%]+test[100:]".

A slice is taken from a fixed shuffled order of its base split, so that even a folder sorted by
class gives every slice all classes. Image folders are stored in such an order, TFDS sets keep their
own (a slice is the one that TFDS gives), and files of arrays are shuffled when sliced.
"""

import itertools
import logging
import math
import re
import types
from typing import Callable, Mapping, Sequence

import numpy as np

from mixer_jax.errors import UserError

_LOG = logging.getLogger(__name__)

# Names of files and folders start with a letter, digit or "_": ".." is no split.
_PART = re.compile(
  r"(?P<base>\w[\w. -]*(?<! )(/\w[\w. -]*(?<! ))*)(\[(?P<start>-?\d{1,18}%?)?:(?P<stop>-?\d{1,18}%?)?\])?"
)
# Base splits and rows of them.
Parts = Sequence[tuple[str, range]]
OWN = ("train", "test", "validation")  # splits that have their own fields
_ELSEWHERE = ("/", "~", ".")
_ALLOWED = 'NAME, NAME[START:STOP] with counts or percents, e.g. "train[:90%]", and sums with "+"'


def shuffled_order(n: int) -> np.ndarray:
  """The one permutation of n examples, [n] int64, that slices refer to."""
  return np.random.default_rng(0).permutation(n)


def by_name(train: str, test: str, validation: str = "", extra: str = "") -> dict[str, str]:
  """Split strings by the name of the split; those of `extra`, with commas, are their own names."""
  others = {"validation": validation} | {(spec := part.strip()): spec for part in extra.split(",")}
  return {"train": train, "test": test} | {name: spec for name, spec in others.items() if spec}


def field(name: str) -> str:
  """The field of a config that holds the split string of a split."""
  return f"data.{name}_split" if name in OWN else "data.extra_test_splits"


def check(specs: Mapping[str, str], extra: str = "") -> None:
  """Raises a UserError for split strings, those of `by_name`, that are none or stand twice."""
  listed = [part.strip() for part in extra.split(",") if part.strip()]
  for spec in listed:
    if spec in OWN or listed.count(spec) > 1:
      own = f"the name of a split with its own field; write {spec}[:]"
      why = own if spec in OWN else "twice; allowed: once"
      raise UserError(f"data.extra_test_splits has {spec!r}, {why}")
  for name, spec in specs.items():
    base_names(spec, field(name))


def base_names(spec: str, field: str) -> list[str]:
  """The base splits that a split string uses, in its order."""
  return [part["base"] for part in _parse(spec, field)]


def parts(spec: str, field: str, num_examples: Callable[[str], int]) -> list[tuple[str, range]]:
  """The base splits that a split string adds up, and the rows of them that it takes.

  A UserError if the string, the value of `field`, is malformed, out of bounds or selects nothing.
  """
  chosen = []
  for part in _parse(spec, field):
    n = num_examples(part["base"])
    bounds = (part["start"] or "0", part["stop"] or str(n))
    start, stop = (_bound(text, n, spec, field) for text in bounds)
    if start >= stop:
      raise UserError(f"{field}={spec!r}: selects none of the {n} examples of {part['base']!r}")
    chosen.append((part["base"], range(start, stop)))
  return chosen


def check_apart(parts: Mapping[str, Parts], specs: Mapping[str, str]) -> None:
  """Refuses a "validation" split that shares examples with "train", and a test set with one twice.

  It warns of a test set that shares examples with "train" or "validation".

  Args:
    parts: of each split, by its name.
    specs: the split strings that they come from, by the same names.
  """
  for name, chosen in parts.items():
    if name == "train":  # it may repeat its own examples
      continue
    for i, (base, rows) in enumerate(chosen):
      if any(base == other and _overlap(base, rows, [(other, own)]) for other, own in chosen[:i]):
        raise UserError(f"the {name} split {specs[name]!r} takes examples of {base!r} twice")
    for picked in ("train", "validation"):
      other = parts.get(picked, ()) if picked != name else ()
      if not (shared := [base for base, rows in chosen if _overlap(base, rows, other)]):
        continue
      where = f"shares examples of {shared[0]!r} with data.{picked}_split={specs[picked]!r}"
      if name == "validation":
        apart = "take them out there, as in train[:90%] and train[90%:]"
        raise UserError(f"data.validation_split={specs[name]!r} {where}; {apart}")
      _LOG.warning("The test set %s (%s) %s: it is no test", name, specs[name], where)


def checked_parts(
  specs: Mapping[str, str],
  num_examples: Callable[[str], int],
  whole: Mapping[str, str] = types.MappingProxyType({}),
) -> dict[str, list[tuple[str, range]]]:
  """The `parts` of each split string, by the name of its split, after `check_apart`.

  `whole` are base splits that are taken whole, by the names of theirs.
  """
  found = {name: parts(spec, field(name), num_examples) for name, spec in specs.items()}
  check_apart(found, specs)
  return found | {name: [(base, range(num_examples(base)))] for name, base in whole.items()}


def joined(
  parts: Sequence[tuple[Mapping[str, np.ndarray], range, bool]],
) -> dict[str, np.ndarray]:
  """Rows of base splits, one after the other.

  Args:
    parts: of each, arrays [n, ...] by name, the rows that are taken, and whether the order of the
      examples is random already. If it is not, a part of a base split is drawn from all over it.
  """
  taken = []
  for arrays, rows, shuffled in parts:
    n, chosen = len(next(iter(arrays.values()))), slice(rows.start, rows.stop)
    if not shuffled and len(rows) < n:
      chosen = shuffled_order(n)[chosen]
    taken.append({name: x[chosen] for name, x in arrays.items()})
  if len(taken) == 1:  # views, maybe of a file
    return taken[0]
  return {name: np.concatenate([part[name] for part in taken]) for name in taken[0]}


def surely_share(spec: str, other: str) -> bool:
  """Whether two split strings share examples, whatever the sizes of their base splits.

  Slices of one base are compared if their bounds are all counts, or all percents, from one end.
  Strings that are no splits, of another kind of task, share all if they are the same.
  """
  if spec == other:
    return True
  try:
    pairs = itertools.product(_parse(spec, "split"), _parse(other, "split"))
  except UserError:
    return False
  return any(map(_surely_overlap, *zip(*pairs)))


def _surely_overlap(one: re.Match, two: re.Match) -> bool:
  some = range(1)
  if not _overlap(one["base"], some, [(two["base"], some)]):
    return False
  starts, stops = ([part[name] for part in (one, two)] for name in ("start", "stop"))
  bounds = [text for text in starts + stops if text]
  if one["base"] != two["base"] or not all(map(any, zip(starts, stops))):
    return True  # one is a whole split, or a folder around the other
  if len({(text.endswith("%"), text.startswith("-")) for text in bounds}) > 1:
    return False
  first = max(_number(text) if text else -math.inf for text in starts)
  return first < min(_number(text) if text else math.inf for text in stops)


def _number(text: str) -> int:
  return int(text.rstrip("%"))


def _overlap(base: str, rows: range, parts: Parts) -> bool:
  """Whether a part shares rows with those given, or one base is a folder that holds the other."""
  shares = lambda other: max(rows.start, other.start) < min(rows.stop, other.stop)
  inside = lambda name: f"{base}/".startswith(f"{name}/") or f"{name}/".startswith(f"{base}/")
  return any(shares(other) if base == name else inside(name) for name, other in parts)


def _parse(spec: str, field: str) -> list[re.Match]:
  found = [_PART.fullmatch(part.strip()) for part in spec.split("+")]
  if not all(found):
    below = "; files are named below data.dir" if spec.strip().startswith(_ELSEWHERE) else ""
    raise UserError(f"{field}={spec!r}: not a split; allowed are {_ALLOWED}{below}")
  return found


def _bound(text: str, n: int, spec: str, field: str) -> int:
  """Converts "10", "-10", "25%" or "-25%" to an index in 0..n, as TFDS does."""
  number = _number(text)
  if abs(number) > (100 if text.endswith("%") else n):
    raise UserError(f"{field}={spec!r}: {text} lies outside the split's {n} examples")
  if text.endswith("%"):
    number = round(number * n / 100)  # TFDS's default rounding
  return number + n if text.startswith("-") else number
