"""The line about the devices, and imports that are kept out."""

import json
import logging
import os
import subprocess
import sys

import pytest

from mixer_jax.runtime import devices
from mixer_jax.runtime.imports import without


def test_the_reason_for_a_cpu_is_said_once(monkeypatch, capsys):
  def line():
    devices.print_line()
    return capsys.readouterr().out.strip()

  monkeypatch.setattr(devices, "_heard", [])
  logger = logging.getLogger("jax._src.xla_bridge")
  before = logger.filters[:], logger.level
  try:
    devices.listen()
    devices.listen()
    logger.info("not a reason")
    for _ in range(2):
      logger.warning("An NVIDIA GPU may be present on this machine,\n but %s is missing.", "CUDA")
    found = line()
  finally:
    logger.filters[:], logger.level = before
  reason = " (An NVIDIA GPU may be present on this machine, but CUDA is missing.)"
  assert found.endswith(f"backend cpu: 8 x cpu{reason}")
  monkeypatch.setattr(devices, "_heard", [])
  assert line().endswith("8 x cpu")


def test_a_library_that_is_kept_out_can_be_imported_afterwards(tmp_path, monkeypatch):
  (tmp_path / "heavy.py").write_text("loaded = True")
  monkeypatch.syspath_prepend(str(tmp_path))
  with without("heavy", "tensorflow"):
    with pytest.raises(ModuleNotFoundError, match="needs heavy, which mixer_jax does not use"):
      import heavy
  import heavy

  assert heavy.loaded
  del sys.modules["heavy"]


def test_no_module_imports_torch_or_tensorflow(tmp_path):
  """Neither when it is imported nor, in tests/test_own_task.py, when a command runs."""
  script = """
import importlib, json, pkgutil, sys
import mixer_jax
for module in pkgutil.walk_packages(mixer_jax.__path__, "mixer_jax."):
  # It imports kfac-jax and is imported on demand, by a module that keeps TensorFlow out of it.
  behind = "mixer_jax.optim.curvature.kfac_jax_blocks"
  if module.name != behind and not module.name.endswith("__main__"):
    importlib.import_module(module.name)
print(json.dumps(sorted({"torch", "tensorflow"} & sys.modules.keys())))
"""
  for name in ("torch", "tensorflow"):
    trap(tmp_path, name)
  result = subprocess.run(
    [sys.executable, "-c", script], env=trapped(tmp_path), capture_output=True, text=True
  )
  assert result.returncode == 0, result.stderr
  assert json.loads(result.stdout.splitlines()[-1]) == []
  assert not list(tmp_path.glob("imported-*"))


def trap(path, name):
  """Puts a module into a directory that says when it is imported, and cannot be."""
  (path / f"{name}.py").write_text(
    f"open({str(path / f'imported-{name}')!r}, 'w').close()\nraise RuntimeError('{name}')\n"
  )


def trapped(path):
  """An environment in which such modules are found first."""
  paths = [str(path), *filter(None, [os.environ.get("PYTHONPATH")])]
  return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
