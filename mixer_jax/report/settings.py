"""The settings of configs as tables: of one, and of all files of a folder."""

import pathlib
from typing import Any

from flax import traverse_util
from ml_collections import ConfigDict

from mixer_jax import config as config_lib
from mixer_jax.errors import UserError
from mixer_jax.report.markdown import escaped
from mixer_jax.study import plan

# Of an optimizer, and not shown.
_USUAL = ("clip_norm", 0.0), ("decay", "kernels")
_COLUMNS = "config", "task", "model", "data", "optimizer", "schedule", "batch", "length", "further"


def own(config: ConfigDict) -> dict[str, Any]:
  """Returns the fields that differ from the task's defaults, and the optimizer's, by path."""
  model = config.get("model", {}).get("name", "")
  both = (config, config_lib.default(config.task, model))
  given, plain = (traverse_util.flatten_dict(c.to_dict(), sep=".") for c in both)
  return {
    name: value
    for name, value in given.items()
    if value is not None and (name.startswith("optimizer.") or value != plain.get(name))
  }


def of_one(config: ConfigDict) -> str:
  """Returns the fields of `own` in Markdown, one a row."""
  rows = [f"| `{k}` | `{escaped(repr(value))}` |" for k, value in own(config).items()]
  head = ["### Set by this config", "", "| field | value |", "| :-- | :-- |"]
  return "\n".join([*head, *rows]) + "\n\n"


def of_all(folder: pathlib.Path) -> str:
  """A row for each config file of a folder, without its argument; a UserError if there is none."""
  files = sorted(folder.glob("*.py"))
  if not files:
    raise UserError(f"--folder is {str(folder)!r}, which has no config, a file that ends in .py")
  rows = [_row(path.name, plan.read_config(path)) for path in files]
  line = lambda cells: f"| {' | '.join(cells)} |"
  return "\n".join(map(line, [_COLUMNS, [":--"] * len(_COLUMNS), *rows])) + "\n"


def _row(name: str, config: ConfigDict) -> list[str]:
  fields = {k: v for k, v in own(config).items() if (k.rpartition(".")[2], v) not in _USUAL}
  steps = f"{config.num_steps:,} steps" if config.num_steps else f"{config.num_epochs:g} epochs"
  for own_column in ("task", "batch_size", "num_steps", "num_epochs"):
    fields.pop(own_column, None)
  groups = [_group(config, fields, group) for group in _COLUMNS[2:6]]
  return [f"`{name}`", config.task, *groups, str(config.batch_size), steps, _listed(fields)]


def _group(config: ConfigDict, fields: dict[str, Any], group: str) -> str:
  """Returns the name of a group's choice and its fields, which are taken out of `fields`."""
  prefix = f"{group}."
  inside = {k.removeprefix(prefix): fields.pop(k) for k in list(fields) if k.startswith(prefix)}
  inside.pop("name", None)
  chosen = config.get(group, {}).get("name", "")
  return ": ".join(filter(None, (chosen and f"**{chosen}**", _listed(inside))))


def _listed(fields: dict[str, Any]) -> str:
  shown = lambda x: f"{x:.6g}" if isinstance(x, float) else escaped(str(x))
  return ", ".join(f"{name}={shown(value)}" for name, value in fields.items())
