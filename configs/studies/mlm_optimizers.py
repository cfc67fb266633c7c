"""AdamW, Muon and K-FAC's family on masked words, tuned as in `sst2_optimizers.py`.

  python -m mixer_jax.study --study=configs/studies/mlm_optimizers.py --workdir=DIR

A small gMLP finds the words behind masks in the bundled sentences of SST-2.
"""

import pathlib
import runpy

_SHARED = runpy.run_path(str(pathlib.Path(__file__).parent / "sst2_optimizers.py"))


def get_study():
  return _SHARED["of_task"]("Optimizers on masked words of SST-2", "mlm", 10)


def get_config(run):
  return get_study().run_config(run)
