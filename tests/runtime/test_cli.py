"""The commands as a user types them: one line for a mistake."""

import os
import subprocess
import sys

import pytest

from tests.children import command

QUICKSTART = "--config=configs/quickstart.py"
GRAFT = "--config=configs/graft_cifar10.py:s4,sgd,kfac"
OWN = "--config=docs/own_task.py"


@pytest.mark.parametrize(
  "args, message",
  [
    ([], "--config is missing"),
    (["--config=configs/none.py"], "--config cannot be used: no such file: configs/none.py"),
    (["--config=configs/kfac_cifar100.py:b8"], "'b8'; allowed: s4, b4, s16, b16"),
    ([f"{QUICKSTART}:lion"], "'lion'; allowed: kfac_muon, kfac_adam, kfac, muon, sgd, adam"),
    (
      [QUICKSTART, "--config.optimiser.damping=1"],
      "error: optimiser is no field of the config; did you mean optimizer?",
    ),
    (
      [QUICKSTART, "--config.optimizer.learning_rte=1"],
      "error: optimizer.learning_rte is no field of the config; did you mean learning_rate?",
    ),
    ([OWN, "--config.pretrained=x"], "error: pretrained is no field of the config"),
    ([OWN, "--config.batch_size=1e3"], "error: batch_size is '1e3'; allowed: an integer"),
    ([OWN, "--config.seed=x=y"], "error: seed is 'x=y'; allowed: an integer"),
    ([OWN, "--config.save_best=maybe"], "error: save_best is 'maybe'; allowed: True or False"),
    (
      [OWN, "--config.optimizer=adam"],
      "optimizer is 'adam'; allowed: a value for one of its fields, as in optimizer.FIELD",
    ),
    ([QUICKSTART, "--config.batch_size=many"], "batch_size"),
    ([QUICKSTART, "--config.batch_size=None"], "batch_size is None; allowed: an integer"),
    (["--config.batch_size=None"], "--config is missing"),
    ([QUICKSTART, "--config.model.name=mixer_b61"], "mixer_b61"),
    ([QUICKSTART, "--config.data.name=cifra10"], "cifra10"),
    ([QUICKSTART, "--config.data.image_size=30"], "image_size"),
    ([QUICKSTART, "--config.data.name=folder", "--config.data.dir=/nowhere"], "/nowhere"),
    ([OWN, "--workdir=/proc/none"], "/proc/none cannot be written"),
    ([OWN, "extra"], "unknown argument 'extra'"),
    (
      [OWN, "--config.data.points=None", "--config.data.points=7"],  # the last one holds
      "data.points is 7; allowed: 8 to 10000",
    ),
    ([OWN, "--config.data.points=7", "--config.data.points=None"], "data.points is None"),
    (["--config=BROKEN"], "invalid syntax (broken.py"),
    (["--config=EMPTY"], "--config cannot be used"),
    (["--config=FAILS"], "fails.py, line 4: KeyError: 'b'"),
    (["--config=TYPED"], "typed.py, line 4: TypeError: Could not override field 'num_epochs'"),
    (["--config=MISSPELT"], "optimiser is no field of a config; did you mean optimizer?"),
    (["--config=FORGETS"], "--config gives None"),
    ([QUICKSTART, "--config.data.name=~/my.npz"], "is a path; allowed are sample, folder, npz"),
    (
      [QUICKSTART, "--config.data.name=/my"],
      "names, with a path as data.dir",
    ),
    (
      [GRAFT, "--config.data.name=sample", "--config.optimizer.scope=layer"],
      "scope is 'layer'; allowed: tensor, global",
    ),
  ],
)
@pytest.mark.first(7)
def test_main_names_mistakes(args, message, tmp_path):
  broken, empty = tmp_path / "broken.py", tmp_path / "empty.py"
  broken.write_text("def get_config(:\n")
  empty.write_text(
    "import ml_collections\n\ndef get_config():\n  return ml_collections.ConfigDict()\n"
  )
  fails, forgets = tmp_path / "fails.py", tmp_path / "forgets.py"
  fails.write_text("def get_config():\n  return part()\ndef part():\n  return {'a': 1}['b']\n")
  forgets.write_text("def get_config():\n  {'a': 1}\n")
  start = "from mixer_jax import config\ndef get_config():\n  c = config.default()\n"
  typed, misspelt = tmp_path / "typed.py", tmp_path / "misspelt.py"
  typed.write_text(f"{start}  c.num_epochs = '5'\n  return c\n")
  misspelt.write_text(f"{start}  c.optimiser = config.optimizer('sgd', 0.1)\n  return c\n")
  files = {"BROKEN": broken, "EMPTY": empty, "FAILS": fails, "FORGETS": forgets}
  files |= {"TYPED": typed, "MISSPELT": misspelt}
  for name, path in files.items():
    args = [arg.replace(name, str(path)) for arg in args]
  ended = command(tmp_path / "log", "main", *args)
  assert message in ended.error and ended.code in (1, 2)


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
      "--out is 'p.csv'; predictions are saved as .npz",
    ),
    ("predict", ["--workdir=PATH", "--out=PATH/no/p.npz"], "there is no folder"),
    ("predict", ["--workdir=PATH", "--inputs=/dev/null", "--out=p.npz"], "has no line that is"),
    ("probe", ["--workdir=PATH", "--temperature=nan"], "--temperature is nan; allowed: a finite"),
    ("export", ["--workdir=PATH"], "--out is missing"),
    (
      "report",
      ["cirves"],
      "the command is 'cirves'; allowed: curves, pictures, augment, weights, compare, study, rows, options, configs",
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
