"""Every config of the repository is compiled for a GPU and for a TPU."""

import importlib.util

import pytest

from benchmarks import configs
from mixer_jax.planning import programs, stand_ins, targets
from mixer_jax.study import plan

_WHEELS = {"h100": "jax_cuda12_plugin", "v5e": "libtpu"}


@pytest.mark.thorough
@pytest.mark.parametrize("spec", _WHEELS)
@pytest.mark.parametrize("name", sorted(configs.chosen([])))
def test_a_config_is_compiled(name, spec, tmp_path):
  if importlib.util.find_spec(_WHEELS[spec]) is None:
    pytest.skip(f"{_WHEELS[spec]} is not installed")
  target = targets.parse(spec)
  [(path, argument)] = configs.chosen([name]).values()
  config = plan.read_config(path, *(() if argument is None else (argument,)))
  config.batch_size = min(config.batch_size, 64)  # some batches are meant for several devices
  run, _ = stand_ins.build(config, targets.devices(target), str(tmp_path))
  compiled = programs.training(run, target)
  assert compiled.bytes < target.usable_memory
  assert sum(o.times * o.products for o in compiled.program.operations) > 0
