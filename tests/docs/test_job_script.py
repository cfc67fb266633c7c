"""The job script of docs/running.md, run by bash with programs in the place of Slurm's."""

import os
import re
import subprocess

from tests.docs.commands import ROOT

_STEP = """#!/bin/bash
trap 'echo signalled >> record; exit 138' USR1
case $CODE in
  signal) kill -USR1 "$JOB"; sleep 0.5; exit 1 ;;
  *) exit "$CODE" ;;
esac
"""


def script():
  (job,) = re.findall(
    r"^```bash\n(.*?)^```", (ROOT / "docs/running.md").read_text(), re.MULTILINE | re.DOTALL
  )
  return job


def ended(script, code, directory):
  """The exit code of a script whose run ends with a code, and what Slurm and the run were told."""
  for name, text in {
    "scontrol": '#!/bin/bash\necho "$@" >> record\n',
    "python": _STEP,
  }.items():
    (directory / name).write_text(text)
    (directory / name).chmod(0o755)
  (directory / "record").write_text("")
  own = {"PATH": f"{directory}:{os.environ['PATH']}", "SLURM_JOB_ID": "17", "CODE": str(code)}
  script = f"export JOB=$$\n{script}"
  done = subprocess.run(["bash", "-c", script], cwd=directory, env=os.environ | own, timeout=60)
  return done.returncode, (directory / "record").read_text().split("\n")[:-1]


def test_a_job_requeues_a_run_that_was_stopped_and_no_other(tmp_path):
  for code in (129, 138, 143):
    assert ended(script(), code, tmp_path) == (0, ["requeue 17"])
  for code in (0, 2, 3, 75):
    assert ended(script(), code, tmp_path) == (code, [])


def test_a_signal_to_the_script_reaches_the_run_whose_end_it_awaits(tmp_path):
  assert ended(script(), "signal", tmp_path) == (0, ["signalled", "requeue 17"])
