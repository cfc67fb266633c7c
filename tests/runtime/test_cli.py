"""The commands as a user types them: one line for a mistake."""

import os
import subprocess
import sys

import pytest

from mixer_jax.rundir import metrics_file
from tests.children import command

QUICKSTART = "--config=configs/quickstart.py"
GRAFT = "--config=configs/graft_cifar10.py:s4,sgd,kfac"
OWN = "--config=docs/own_task.py"


CONFIGS = {
  "empty": "import ml_collections\n\ndef get_config():\n  return ml_collections.ConfigDict()\n",
  "forgets": "def get_config():\n  {'a': 1}\n",
  "misspelt": "from mixer_jax import config\ndef get_config():\n  c = config.default()\n"
  "  c.optimiser = config.optimizer('sgd', 0.1)\n  return c\n",
}


@pytest.mark.parametrize(
  "args, message",
  [
    ([], "--config is missing"),
    ([QUICKSTART, "--config.optimiser.damping=1"], 'Did you mean "optimizer"'),
    ([OWN, "--config.batch_size=1e3"], "--config.batch_size=1e3: invalid literal for int"),
    ([QUICKSTART, "--config.batch_size=None"], "batch_size is None; allowed: 1 or more"),
    ([OWN, "--workdir=/proc/none"], "/proc/none cannot be written"),
    ([OWN, "extra"], "unknown argument 'extra'"),
    (["--config=misspelt.py"], "optimiser is no field of a config"),
    (["--config=forgets.py"], "its get_config returns nothing"),
    (["--config=empty.py"], "--config cannot be used"),
    (["--config=configs/none.py"], "No such file or directory: 'configs/none.py'"),
    (["--config=configs/kfac_cifar100.py:b8"], "'b8'; allowed: s4, b4, s16, b16"),
    ([OWN, "--config.pretrained=x"], "no such field: 'pretrained'"),
    ([OWN, "--config.optimizer=adam"], "--config.optimizer=adam: "),
    (["--config.batch_size=None"], "--config is missing"),
    (
      [OWN, "--config.data.points=None", "--config.data.points=7"],  # the last one holds
      "data.points is 7; allowed: 8 to 10000",
    ),
    ([OWN, "--config.data.points=7", "--config.data.points=None"], "data.points is None"),
    ([QUICKSTART, "--config.data.name=~/my.npz"], "data.name=~/my.npz is a path"),
    (
      [GRAFT, "--config.data.name=sample", "--config.optimizer.scope=layer"],
      "scope is 'layer'; allowed: tensor, global",
    ),
  ],
)
@pytest.mark.first(7)
def test_main_names_mistakes(args, message, tmp_path):
  for name, text in CONFIGS.items():
    (tmp_path / f"{name}.py").write_text(text)
    args = [arg.replace(f"={name}.py", f"={tmp_path}/{name}.py") for arg in args]
  ended = command(tmp_path / "log", "main", *args)
  assert message in ended.error and ended.code == 2


@pytest.mark.parametrize(
  "module, args, message",
  [
    ("evaluate", [], "--workdir is missing"),
    ("evaluate", ["--workdir=PATH/none"], "does not exist"),
    ("evaluate", ["--workdir=PATH"], "holds no run"),
    ("predict", ["--workdir=PATH"], "predict takes inputs, or --out=FILE.npz"),
    (
      "predict",
      ["--workdir=PATH", "--out=p.csv"],
      "--out is 'p.csv'; arrays are saved as .npz",
    ),
    ("predict", ["--workdir=PATH", "--out=PATH/no/p.npz"], "there is no folder"),
    ("predict", ["--workdir=PATH", "--inputs=/dev/null", "--out=p.npz"], "has no line that is"),
    (
      "probe",
      ["--workdir=PATH", "--temperature=nan"],
      "--temperature is nan; allowed: 0.001 to 100",
    ),
    ("export", ["--workdir=PATH"], "--out is missing"),
    (
      "report",
      ["cirves"],
      "the command is 'cirves'",
    ),
    ("report", ["curves"], "--workdir is missing"),
    ("report", ["curves", "--workdir=PATH", "--out=a.png"], "takes no --out; it takes --workdir"),
    ("study", ["--workdir=PATH"], "--study is missing"),
  ],
)
def test_the_other_commands_name_mistakes(module, args, message, tmp_path):
  module = {"report": "report.__main__", "study": "study.__main__"}.get(module, module)
  args = [arg.replace("PATH", str(tmp_path)) for arg in args]
  ended = command(tmp_path / "log", module, *args)
  assert message in ended.error and ended.code in (1, 2)


def test_a_command_whose_reader_has_gone_ends_without_a_word():
  read, write = os.pipe()
  os.close(read)
  arguments = ["-m", "mixer_jax.report", "options", QUICKSTART]
  ended = subprocess.run([sys.executable, *arguments], stdout=write, stderr=subprocess.PIPE)
  os.close(write)
  assert ended.returncode == 128 + 13 and not ended.stderr


def in_shell(line, **environment):
  """The exit code and the standard error of a command with its redirections."""
  whole = f"{sys.executable} -m mixer_jax.{line}"
  found = subprocess.run(whole, shell=True, stderr=subprocess.PIPE, env=os.environ | environment)
  return found.returncode, found.stderr.decode()


def test_an_output_that_is_closed_or_full():
  assert in_shell(f"report options {QUICKSTART} >&-") == (0, "")
  code, error = in_shell(f"report options {QUICKSTART} > /dev/full")
  assert code == 75 and error.count("\n") == 1 and "standard output" in error


@pytest.mark.thorough
def test_a_run_without_standard_streams_goes_on(tmp_path):
  few = f"{OWN} --workdir={tmp_path} --config.num_epochs=2 --config.eval_epochs=1"
  assert in_shell(f"main {few} <&- >&-") == (0, "")
  assert [row["epoch"] for row in metrics_file.read(tmp_path)] == [1, 2]
  assert not (tmp_path / "lock").read_bytes()  # no stream was the file that was opened first


@pytest.mark.parametrize("platform", ["cuda", "tpu", "nonsense"])
@pytest.mark.first(1)
def test_a_platform_that_is_not_there(tmp_path, platform):
  line = f"main {OWN} --workdir={tmp_path} > /dev/null"
  code, error = in_shell(line, JAX_PLATFORMS=platform)
  assert code == 2 and error.count("\n") == 1 and f"JAX_PLATFORMS is '{platform}'" in error


@pytest.mark.thorough
def test_an_unusable_cache_is_told(tmp_path):
  (tmp_path / "file").write_text("")
  ended = command(
    tmp_path / "log",
    "main",
    f"{QUICKSTART}:sgd",
    f"--workdir={tmp_path}/run",
    f"--config.data.cache_dir={tmp_path}/file/cache",
    *("--config.num_steps=2", "--config.mesh.data=1", "--config.model.num_blocks=0"),
    *("--config.data.train_split=train[:128]", "--config.data.test_split=test[:100]"),
  )
  assert ended.code == 0, ended.err
  assert ended.err.count("examples are decoded at every start") == 1
