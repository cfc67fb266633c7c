"""Parses commands of this repository as they would, without running them; a program.

Reads a JSON list of [module, argument, ...] from stdin and writes a list with an error for
each, null for none. One process for all: importing takes longer than parsing.
"""

import functools
import json
import pathlib
import runpy
import sys
import tempfile
from unittest import mock

from absl import flags

from mixer_jax import config as config_lib
from mixer_jax import models
from mixer_jax.runtime import cli
from mixer_jax.study import plan, record


def _parse(module: str, arguments: list[str]) -> None:
  """Raises if a command is not understood."""
  run, commands = mock.Mock(), mock.Mock()
  sys.argv = [module, *arguments]  # config flags look for overrides there
  with mock.patch.object(cli, "run", run), mock.patch.object(cli, "run_commands", commands):
    runpy.run_module(module, run_name="__main__", alter_sys=True)
  words = flags.FLAGS(sys.argv)[1:]
  if run.called:
    assert not words or run.call_args.kwargs.get("arguments"), f"{words} are no options"
  else:
    known, options = (*commands.call_args.args, {})[:2]
    assert len(words) == 1 and words[0] in known, f"{words} is none of {list(known)}"
    others = {*" ".join(options.values()).split()} - {*options.get(words[0], "").split()}
    assert not [x for x in others if flags.FLAGS[x].present], f"{words[0]} takes none of {others}"
  given = lambda name: flags.FLAGS[name].value if name in flags.FLAGS else None
  if given("config") is not None:
    config_lib.check(cli.checked_config(flags.FLAGS.config))
  if given("study"):
    study = _study(flags.FLAGS.study, tuple(flags.FLAGS.set))
    assert not flags.FLAGS.run or study.select(flags.FLAGS.run)
  if words[:1] != ["operator_peers"]:  # its models are kinds of attention
    for name in given("models") or ():
      models.fields(name)


@functools.cache
def _study(file: str, assignments: tuple[str, ...]) -> plan.Study:
  """A study whose runs are all usable."""
  study = plan.load(file)
  with tempfile.TemporaryDirectory() as directory:
    record.open_study(pathlib.Path(directory), study, file, assignments)
  return study


def main() -> None:
  known = set(flags.FLAGS)
  results = []
  for module, *arguments in json.load(sys.stdin):
    try:
      _parse(module, arguments)
      results.append(None)
    except (Exception, SystemExit) as e:
      results.append(f"{type(e).__name__}: {' '.join(str(e).split())[-1200:]}")
    for name in set(flags.FLAGS) - known:
      delattr(flags.FLAGS, name)
    flags.FLAGS.unparse_flags()
  json.dump(results, sys.stdout)


if __name__ == "__main__":
  main()
