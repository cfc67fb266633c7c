"""The commands as a user types them: one clear line and an exit code."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
TINY = ["--config.num_epochs=1", "--config.data.train_split=train[:256]", "--config.mesh.data=1",
        "--config.data.test_split=test[:100]", "--config.model.num_blocks=1",
        "--config.model.hidden_dim=16"]  # fmt: skip


def run(module, *args, env=(), timeout=120):
  return subprocess.run(
    [sys.executable, "-m", f"mixer_jax.{module}", *args],
    cwd=ROOT,
    env=os.environ | dict(env),
    capture_output=True,
    text=True,
    timeout=timeout,
  )


def error_line(result):
  assert result.returncode in (1, 2), result.stderr
  assert "Traceback" not in result.stderr
  lines = [line for line in result.stderr.splitlines() if line.startswith(("error:", "FATAL"))]
  assert len(lines) == 1, result.stderr
  return result.stderr


QUICKSTART = "--config=configs/quickstart.py"
GRAFT = "--config=configs/graft_cifar10.py:s4,sgd,kfac"


@pytest.mark.parametrize(
  "args, message",
  [
    ([], "--config is missing"),
    (["--config=configs/none.py"], "configs/none.py"),
    (["--config=configs/kfac_cifar100.py:b8"], "'b8'; allowed: s4, b4, s16, b16"),
    (["--config=configs/quickstart.py:lion"], "'lion'; allowed: kfac, sgd, adam"),
    ([QUICKSTART, "--config.optimiser.damping=1"], "optimiser"),
    ([QUICKSTART, "--config.batch_size=many"], "batch_size"),
    ([QUICKSTART, "--config.model.name=mixer_b61"], "mixer_b61"),
    ([QUICKSTART, "--config.data.name=cifra10"], "cifra10"),
    ([QUICKSTART, "--config.data.image_size=30"], "image_size"),
    ([QUICKSTART, "--config.data.name=folder", "--config.data.dir=/nowhere"], "/nowhere"),
    ([QUICKSTART, "--workdir=/proc/none"], "/proc/none cannot be written"),
    ([QUICKSTART, "extra"], "unknown argument 'extra'"),
    (["--config=BROKEN"], "invalid syntax (broken.py"),
    (["--config=EMPTY"], "--config cannot be used"),
    (
      [GRAFT, "--config.data.name=sample", "--config.optimizer.scope=layer"],
      "scope is 'layer'; allowed: tensor, global",
    ),
  ],
)
def test_main_names_mistakes(args, message, tmp_path):
  broken, empty = tmp_path / "broken.py", tmp_path / "empty.py"
  broken.write_text("def get_config(:\n")
  empty.write_text(
    "import ml_collections\n\ndef get_config():\n  return ml_collections.ConfigDict()\n"
  )
  files = {"BROKEN": str(broken), "EMPTY": str(empty)}
  for name, path in files.items():
    args = [arg.replace(name, path) for arg in args]
  assert message in error_line(run("main", *args))


def test_an_unusable_cache_is_told(tmp_path):
  (tmp_path / "file").write_text("")
  cache = f"--config.data.cache_dir={tmp_path}/file/cache"
  result = run("main", QUICKSTART + ":sgd", f"--workdir={tmp_path}/run", cache, *TINY)
  assert result.returncode == 0, result.stderr
  assert result.stderr.count("images are decoded into memory at every start") == 1


def test_evaluate_names_mistakes(tmp_path):
  assert "--workdir is missing" in error_line(run("evaluate"))
  assert "does not exist" in error_line(run("evaluate", f"--workdir={tmp_path}/none"))
  assert "holds no run" in error_line(run("evaluate", f"--workdir={tmp_path}"))


def test_train_then_evaluate_without_tensorflow(tmp_path):
  """A TensorFlow that is installed must not even be imported."""
  trap = tmp_path / "trap" / "tensorflow"
  trap.mkdir(parents=True)
  (trap / "__init__.py").write_text(
    f"open({str(tmp_path / 'imported')!r}, 'w').close()\n__version__ = '2.99.0'\n"
  )
  env = {"PYTHONPATH": str(trap.parent), "XDG_CACHE_HOME": str(tmp_path / "cache")}
  workdir = tmp_path / "runs" / "x"
  relative = os.path.relpath(workdir, ROOT)
  trained = run("main", QUICKSTART, f"--workdir={relative}", *TINY, env=env)
  assert trained.returncode == 0, trained.stderr
  assert "backend cpu" in trained.stdout.splitlines()[0]
  assert "MixerBlock_0/token_mixing/Dense_0" in trained.stdout
  assert (workdir / "curves.png").exists()
  logged = float(re.search(r"top-1 ([\d.]+)%", trained.stdout)[1])
  evaluated = run("evaluate", f"--workdir={relative}", env=env)
  assert evaluated.returncode == 0, evaluated.stderr
  assert float(re.search(r"top-1 ([\d.]+)%", evaluated.stdout)[1]) == pytest.approx(
    logged, abs=0.01
  )
  assert not (tmp_path / "imported").exists()
  missing = error_line(run("evaluate", f"--workdir={relative}", "--checkpoint=7", env=env))
  assert "checkpoint '7' is not in" in missing
