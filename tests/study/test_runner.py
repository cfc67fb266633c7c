"""Runs that are started, stopped, resumed and chosen by tuning; without a net."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import types

import pytest

from mixer_jax.errors import UserError
from mixer_jax.rundir import lock, metrics_file
from mixer_jax.study import Study, Tuning, plan, record, runner
from mixer_jax.study import __main__ as command
from tests.study.grid import GRID, errors

# Stands for `mixer_jax.main` below: it writes an epoch's row every `pause` seconds, resumes after
# the rows that are there, stops by SIGTERM, and executes a line of its own.
FAKE = """
import json, pathlib, signal, sys, time
path, epochs, value, pause, name = pathlib.Path(sys.argv[1]), *map(float, sys.argv[2:5]), sys.argv[5]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
exec(sys.argv[6])
metrics = path / "metrics.jsonl"
rows = metrics.read_text().count("\\n") if metrics.exists() else 0
for epoch in range(rows + 1, int(epochs) + 1):
  time.sleep(pause)
  row = {"epoch": epoch, "step": 10 * epoch, "seconds": 1.0, "test/loss": 1 - value, f"test/{name}": value,
         f"test/best_{name}": value, "test/best_step": 10}
  with metrics.open("a") as f:
    f.write(json.dumps(row) + "\\n")
"""


class Fakes(runner.Runner):
  """Runs the script above; its value and its line of code by the run's name."""

  def __init__(self, opened, *args, values=None, pause=0.0, code=None, **kwargs):
    super().__init__(opened, *args, **kwargs)
    self.started = []
    self._fake = lambda run: [
      *(sys.executable, "-S", "-c", FAKE, str(opened.path(run)), "3"),
      *(str((values or {}).get(run.name, 0.5)), str(pause)),
      *(opened.primary.name, (code or {}).get(run.name, "")),
    ]

  def command(self, run, settings):
    self.chosen = getattr(self, "chosen", {}) | {run.name: settings}
    self.started.append(run.name)
    return self._fake(run)


def open_tiny(path, **fields):
  return record.open_study(path, Study(**GRID | {"seeds": (0,)} | fields), "f.py", [])


def kinds(opened):
  return {run.name: opened.state(run).kind for run in opened.runs}


def test_each_run_is_run_once(tmp_path, capsys):
  opened = open_tiny(tmp_path)
  assert set(kinds(opened).values()) == {"waiting"}
  first = Fakes(opened)
  first.run(opened.runs[:1])
  assert kinds(opened) == {
    "m1-sgd-seed0": "done",
    "m1-adam-seed0": "waiting",
    "m2-sgd-seed0": "waiting",
    "m2-adam-seed0": "waiting",
  }
  again = Fakes(opened)
  again.run(opened.runs)
  assert again.started == ["m1-adam-seed0", "m2-sgd-seed0", "m2-adam-seed0"]
  assert set(kinds(opened).values()) == {"done"}
  assert "m2-adam-seed0: epoch 3 of 3  test top1 50.00%  1.0 s\nm2-adam-seed0: done" in (
    capsys.readouterr().out
  )


def test_failures_are_recorded_with_their_reason_and_stop_nothing(tmp_path):
  opened = open_tiny(tmp_path)
  failures = {
    "m1-sgd-seed0": "print('error: the loss of step 1 is not finite'); sys.exit(3)",
    "m1-adam-seed0": "import os; os.kill(os.getpid(), 9)",
    "m2-sgd-seed0": "sys.exit('MemoryError: 16 GiB\\n---\\nFor simplicity, JAX ...')",
    "m2-adam-seed0": "print('nothing was written'); sys.exit(0)",
  }
  Fakes(opened, code=failures).run(opened.runs)
  assert {run.name: opened.state(run) for run in opened.runs} == {
    "m1-sgd-seed0": ("failed", "", "the loss of step 1 is not finite"),
    "m1-adam-seed0": ("failed", "", f"ended by SIGKILL; see {tmp_path}/m1-adam-seed0/log.txt"),
    "m2-sgd-seed0": ("failed", "", "exit code 1: MemoryError: 16 GiB"),
    "m2-adam-seed0": ("failed", "", "exit code 0: nothing was written"),
  }
  left_alone = Fakes(opened)
  left_alone.run(opened.runs)
  assert not left_alone.started
  opened.forget(opened.runs[0])
  retried = Fakes(opened)
  retried.run(opened.runs)
  assert retried.started == ["m1-sgd-seed0"]
  assert opened.state(opened.runs[0]).kind == "done"


def test_a_reason_is_of_the_last_attempt(tmp_path):
  opened = open_tiny(tmp_path)
  for code in ("print('error: first'); sys.exit(2)", "print('second'); sys.exit(3)"):
    opened.forget(opened.runs[0])
    Fakes(opened, code={"m1-sgd-seed0": code}).run(opened.runs[:1])
  assert opened.state(opened.runs[0]).reason == "exit code 3: second"


MEET = """
(path.parent / path.name[:2]).touch()
while not all((path.parent / name).exists() for name in ("m1", "m2")):
  time.sleep(0.01)
"""


def test_two_at_a_time_overlap(tmp_path):
  opened = open_tiny(tmp_path)
  runs = [run for run in opened.runs if run.cell[1] == "sgd"]
  code = {run.name: MEET for run in runs}  # each waits for the other
  Fakes(opened, 2, code=code).run(runs)
  assert [opened.state(run).kind for run in runs] == ["done", "done"]


@pytest.mark.skipif(
  not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
  reason="needs two processors",
)
def test_processes_share_the_processors(tmp_path):
  opened = open_tiny(tmp_path)
  tell = "import os; (path / 'cpus').write_text(json.dumps(list(os.sched_getaffinity(0))))"
  code = {run.name: f"time.sleep(0.2); {tell}" for run in opened.runs}
  Fakes(opened, 2, code=code, pause=0.1).run(opened.runs[:2])
  a, b = (set(json.loads((opened.path(r) / "cpus").read_text())) for r in opened.runs[:2])
  assert a and b and not a & b and a | b <= os.sched_getaffinity(0)


def test_the_deadline_stops_runs_and_the_next_call_resumes_them(tmp_path, capsys):
  opened = open_tiny(tmp_path)
  once = "sleep = time.sleep; time.sleep = lambda _: sleep(60 if metrics.exists() else 0)"
  late = Fakes(opened, deadline=time.monotonic() + 3, code={"m1-sgd-seed0": once})
  late.run(opened.runs)
  assert late.started == ["m1-sgd-seed0"] and late.out_of_time
  assert opened.state(opened.runs[0]) == ("interrupted", "epoch 1 of 3", "")
  assert "m1-sgd-seed0: stopped after epoch 1 of 3\n" in capsys.readouterr().out
  Fakes(opened).run(opened.runs)
  assert [row["epoch"] for row in metrics_file.read(tmp_path / "m1-sgd-seed0")] == [1, 2, 3]
  assert set(kinds(opened).values()) == {"done"}


def test_an_interruption_after_the_deadline_does_not_ask_a_run_twice(tmp_path):
  opened = open_tiny(tmp_path)
  tell = "(path / 'asked').open('a').write('x')"
  saves = f"signal.signal(signal.SIGTERM, lambda *_: ({tell}, time.sleep(2.0), sys.exit(143)))"
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT)).start()
  late = Fakes(opened, deadline=time.monotonic() + 1.0, pause=60.0, code={"m1-sgd-seed0": saves})
  with pytest.raises(KeyboardInterrupt):
    late.run(opened.runs[:1])
  signal.signal(signal.SIGINT, before)
  assert (tmp_path / "m1-sgd-seed0" / "asked").read_text() == "x"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.thorough
def test_a_second_interruption_ends_all_processes(tmp_path, number):
  opened = open_tiny(tmp_path)
  # As study.__main__ does; a shell's background jobs ignore SIGINT.
  numbers = signal.SIGINT, signal.SIGTERM
  before = {n: signal.signal(n, signal.default_int_handler) for n in numbers}
  for seconds in (1.0, 2.5):
    threading.Timer(seconds, os.kill, (os.getpid(), number)).start()
  deaf = {"m1-adam-seed0": "signal.signal(signal.SIGTERM, signal.SIG_IGN)"}
  began = time.monotonic()
  with pytest.raises(KeyboardInterrupt):
    Fakes(opened, 2, pause=60.0, code=deaf).run(opened.runs)
  for n, handler in before.items():
    signal.signal(n, handler)
  assert 2.5 <= time.monotonic() - began < 30
  assert sorted(kinds(opened).values()) == ["interrupted"] * 2 + ["waiting"] * 2  # no lock is held


@pytest.mark.parametrize("end", ["sys.exit(130)", "sys.exit(143)", "os.kill(os.getpid(), 15)"])
def test_a_run_that_somebody_stops_has_not_failed(tmp_path, end):
  opened = open_tiny(tmp_path)
  code = f"import os; signal.signal(signal.SIGTERM, signal.SIG_DFL); {end}"
  Fakes(opened, code={"m1-sgd-seed0": code}).run(opened.runs[:1])
  assert opened.state(opened.runs[0]).kind == "interrupted"


def test_the_exit_code_tells_whether_all_is_done(tmp_path):
  opened = open_tiny(tmp_path)
  runs = Fakes(opened, code={"m1-sgd-seed0": "sys.exit(143)"})
  runs.run(opened.runs[:2])
  assert command._told(opened, opened.runs[1:2], runs) == 0
  assert command._told(opened, opened.runs[:2], runs) == 1
  late = Fakes(opened, deadline=time.monotonic() - 1)
  assert command._told(opened, opened.runs[:2], late) == 0


def test_listing_writes_nothing(tmp_path, monkeypatch, capsys):
  open_tiny(tmp_path)
  files = lambda: [(path, path.stat().st_mtime_ns) for path in sorted(tmp_path.rglob("*"))]
  before = files()
  monkeypatch.setattr(command.flags, "FLAGS", types.SimpleNamespace(run="m1-*"))
  command._list(Study(**GRID | {"seeds": (0,)}), tmp_path)
  assert capsys.readouterr().out == "m1-sgd-seed0  waiting\nm1-adam-seed0  waiting\n"
  assert files() == before


def test_a_run_is_trained_by_one_process_only(tmp_path, capsys):
  opened = open_tiny(tmp_path)
  path = opened.path(opened.runs[0])
  path.mkdir()
  held = lock.hold(path)
  assert opened.state(opened.runs[0]).kind == "running"
  other = Fakes(opened)
  other.run(opened.runs[:2])
  assert other.started == ["m1-adam-seed0"]
  assert "m1-sgd-seed0: another process runs it" in capsys.readouterr().out
  os.close(held)
  assert opened.state(opened.runs[0]).kind == "interrupted"


def test_the_lock_outlives_the_one_who_took_it(tmp_path):
  held = lock.hold(tmp_path)
  child = subprocess.Popen(["sleep", "60"], pass_fds=(held,))
  os.close(held)
  assert lock.hold(tmp_path) is None
  child.kill()
  child.wait()
  assert lock.hold(tmp_path) is not None


def tuned(tmp_path, **fields):
  candidates = {
    "sgd": [{"optimizer.learning_rate": r} for r in (0.1, 0.2, 0.3)],
    "adam": [{"optimizer.learning_rate": r, "optimizer.b1": 0.8} for r in (0.01, 0.02, 0.03)],
  }
  axes = {"model": ("m1",), "optimizer": ("sgd", "adam")}
  study = Study(**GRID | dict(axes=axes, tuning=Tuning(candidates), seeds=(0, 1)) | fields)
  return record.open_study(tmp_path, study, "f.py", [])


@pytest.mark.thorough
def test_tuning_chooses_by_the_last_evaluation(tmp_path):
  opened = tuned(tmp_path)
  tries = [run for run in opened.runs if run.tunes]
  finals = [run for run in opened.runs if not run.tunes]
  for run in tries:
    data = opened.config(run).data
    assert (data.train_split, data.test_split) == ("train[:90%]", "train[90%:]")
  early = Fakes(opened)
  early.run(finals)
  assert not early.started  # nothing is chosen yet
  values = {"tune-m1-sgd-1": 0.7, "tune-m1-adam-2": 0.9, "tune-m1-adam-0": 0.95}
  broken = {"tune-m1-adam-0": "print('error: the loss is nan'); sys.exit(3)"}
  Fakes(opened, values=values, code=broken).run(tries)
  last = Fakes(opened)
  last.run(finals)
  assert last.chosen["m1-adam-seed1"] == {"optimizer.learning_rate": 0.03, "optimizer.b1": 0.8}
  sgd, adam = (opened.trials(("m1", optimizer)) for optimizer in ("sgd", "adam"))
  assert sgd[0]["run"] == "tune-m1-sgd-1"
  assert adam[0]["run"] == "tune-m1-adam-2"
  assert adam[0]["settings"] == {"optimizer.learning_rate": 0.03, "optimizer.b1": 0.8}
  shown = {t["run"]: t.get("last", t.get("failed")) for t in adam}
  assert shown == {
    "tune-m1-adam-0": "the loss is nan",
    "tune-m1-adam-1": 0.5,
    "tune-m1-adam-2": 0.9,
  }
  command = runner.Runner(opened).command(opened.runs[-1], adam[0]["settings"])
  assert command[1:4] == ["-m", "mixer_jax.main", "--config=f.py:m1-adam-seed1"]
  assert set(command[5:]) == {"--config.optimizer.learning_rate=0.03", "--config.optimizer.b1=0.8"}
  assert {opened.state(run).kind for run in finals} == {"done"}
  # A choice that runs were begun with stays: its failed candidates are not tried again.
  (opened.path(finals[-1]) / "config.json").write_text(json.dumps(finals[-1].config))
  for run in tries:
    opened.forget(run)
  kinds_of = lambda optimizer: [opened.state(r).kind for r in tries if r.cell[1] == optimizer]
  assert (kinds_of("sgd"), kinds_of("adam")) == (["interrupted"] * 3, ["failed", "done", "done"])


@pytest.mark.thorough
def test_a_cell_whose_tuning_failed_is_told_and_can_be_retried(tmp_path):
  opened = tuned(
    tmp_path,
    axes={"model": ("m1",), "optimizer": ("sgd",)},
    tuning=Tuning({"sgd": [{"optimizer.learning_rate": r} for r in (0.1, 0.2)]}),
  )
  tries, finals = opened.runs[:2], opened.runs[2:]
  failing = {run.name: "sys.exit(3)" for run in tries}
  Fakes(opened, code=failing).run(opened.runs)
  assert {opened.state(r).reason for r in finals} == {"no candidate of its tuning was finished"}
  for run in opened.runs:
    opened.forget(run)
  Fakes(opened).run(tries)
  Fakes(opened).run(finals)
  assert set(kinds(opened).values()) == {"done"}


def test_a_try_that_failed_for_another_reason_is_no_lost_one(tmp_path):
  """Its cell is decided when it has been run again."""
  opened = tuned(tmp_path, axes={"model": ("m1",), "optimizer": ("sgd",)},
                 tuning=Tuning({"sgd": [{"optimizer.learning_rate": r} for r in (0.1, 0.2)]}))  # fmt: skip
  tries, finals = opened.runs[:2], opened.runs[2:]
  Fakes(opened, code={tries[1].name: "import os; os.kill(os.getpid(), 9)"}).run(tries)
  assert opened.trials(("m1", "sgd")) is None and opened.undecided(("m1", "sgd")) == [tries[1]]
  none = Fakes(opened)
  none.run(finals)
  assert not none.started
  assert opened.forget(tries[1])
  Fakes(opened, values={tries[1].name: 0.9}).run(opened.runs[:2])
  assert opened.trials(("m1", "sgd"))[0]["run"] == tries[1].name


def test_a_mistake_that_all_runs_share_ends_the_call(tmp_path):
  opened = open_tiny(tmp_path)
  wrong = {run.name: "print('error: data.dir is missing'); sys.exit(2)" for run in opened.runs}
  fakes = Fakes(opened, code=wrong)
  fakes.run(opened.runs)
  assert len(fakes.started) == 3 and fakes.gave_up and kinds(opened)["m2-adam-seed0"] == "waiting"
  for run in opened.runs[:3]:
    opened.forget(run)
  fakes = Fakes(opened, code={name: code for name, code in list(wrong.items())[::2]})
  fakes.run(opened.runs)
  assert len(fakes.started) == 4 and not fakes.gave_up


def test_a_full_disk_leaves_runs_interrupted(tmp_path, capsys):
  opened = open_tiny(tmp_path)
  full = "print('error: DIR cannot be written: No space left on device'); sys.exit(75)"
  fakes = Fakes(opened, code={run.name: full for run in opened.runs})
  fakes.run(opened.runs)
  assert fakes.gave_up and [kinds(opened)[name] for name in fakes.started] == 3 * ["interrupted"]
  assert f"{fakes.started[0]}: stopped: DIR cannot be written: No space" in capsys.readouterr().out
  Fakes(opened).run(opened.runs)
  assert set(kinds(opened).values()) == {"done"}


def test_a_good_run_between_mistakes_goes_on(tmp_path):
  opened = record.open_study(tmp_path, Study(**GRID), "f.py", [])
  mistake = "print('error: data.dir is missing'); sys.exit(2)"
  wrong = {run.name: mistake for i, run in enumerate(opened.runs) if i % 3 != 2}
  fakes = Fakes(opened, code=wrong)
  fakes.run(opened.runs)
  assert len(wrong) > 3 and len(fakes.started) == len(opened.runs) and not fakes.gave_up


def test_overrides_keep_out_of_tuning(tmp_path):
  study = Study(
    **GRID | dict(tuning=Tuning({o: [{"optimizer.learning_rate": 0.1}] for o in ("sgd", "adam")}))
  )
  for field in ("optimizer.learning_rate=1.0", "data.train_split=train", "data.test_split=test"):
    with pytest.raises(UserError, match="which the study's tuning decides on"):
      record.open_study(tmp_path, study, "f.py", [field])


def test_any_task_is_tuned_by_its_own_metric(tmp_path, capsys):
  rates = [{"optimizer.learning_rate": rate} for rate in (0.1, 0.2, 0.3)]
  tuning = Tuning({"sgd": rates}, hold_out={"points.fold": "last"}, seed=7)
  study = Study(title="t", config=errors, axes={"optimizer": ("sgd",)}, seeds=(0,), tuning=tuning)
  opened = record.open_study(tmp_path, study, "f.py", [])
  values = {"tune-sgd-0": 0.3, "tune-sgd-1": 0.02, "tune-sgd-2": 0.1}
  Fakes(opened, values=values).run(opened.runs[:3])
  assert opened.trials(("sgd",))[0]["run"] == "tune-sgd-1"
  configs = [opened.config(run) for run in opened.runs]
  assert [config.points.fold for config in configs] == ["last"] * 3 + ["test"]
  assert [config.seed for config in configs] == [7, 7, 7, 0]
  assert "tune-sgd-1: step 30 of 30  held-out error 0.02  1.0 s\n" in capsys.readouterr().out


def test_settings_are_chosen_by_another_number_of_the_last_row(tmp_path):
  """The error of the second is the least, the training loss of the first."""
  rates = [{"optimizer.learning_rate": rate} for rate in (0.1, 0.2)]
  tuning = Tuning({"sgd": rates}, hold_out={}, metric="train/loss")
  study = Study(title="t", config=errors, axes={"optimizer": ("sgd",)}, seeds=(0,), tuning=tuning)
  opened = record.open_study(tmp_path, study, "f.py", [])
  code = {}
  for run, loss, error in zip(opened.runs, (1e-3, 1e-2), (0.3, 0.1)):
    row = {"step": 30, "epoch": 1, "seconds": 1.0, "test/error": error, "train/loss": loss}
    row = json.dumps(row | {"test/best_error": error}) + "\n"
    code[run.name] = f"(path / 'metrics.jsonl').write_text({row!r}); sys.exit(0)"
  Fakes(opened, code=code).run(opened.runs[:2])
  first, second = opened.trials(("sgd",))
  assert (first["run"], first["last"], second["last"]) == ("tune-sgd-0", 1e-3, 1e-2)


def test_tries_compared_on_a_validation_split_show_that_one(tmp_path, capsys):
  rates = {name: [{"optimizer.learning_rate": 0.1}] for name in ("sgd", "adam")}
  opened = record.open_study(tmp_path, Study(**GRID | dict(tuning=Tuning(rates))), "f.py", [])
  name = opened.primary.name
  row = {"step": 10, "epoch": 1, "seconds": 1.0, "test/loss": 1.0, f"test/{name}": 0.9}
  row |= {f"validation/{name}": 0.25, f"validation/best_{name}": 0.25, "validation/loss": 1.0}
  row = json.dumps(row) + "\n"
  write = f"(path / 'metrics.jsonl').write_text({row!r}); sys.exit(0)"
  Fakes(opened, code={opened.runs[0].name: write}).run(opened.runs[:1])
  assert f"held-out {name} 25.00%" in capsys.readouterr().out


def test_a_file_without_its_function_is_told(tmp_path):
  file = tmp_path / "file.py"
  file.write_text("study = None\n")
  with pytest.raises(UserError, match="file.py has no function get_study$"):
    plan.load(str(file))


def test_a_study_in_a_folder_with_a_colon_is_refused(tmp_path):
  """Its runs are started by --config=FILE:RUN."""
  file = tmp_path / "a:b" / "study.py"
  file.parent.mkdir()
  lines = ("from mixer_jax import study", "from tests.study.grid import GRID")
  file.write_text("\n".join((*lines, "get_study = lambda: study.Study(**GRID)")))
  with pytest.raises(UserError, match="study.py has a ':'; allowed: a path without one"):
    plan.load(str(file))
  assert plan.load(str(file.rename(tmp_path / "study.py"))).title == "t"


class Flags(types.SimpleNamespace):
  """Flags of the command, as absl has them."""

  def __getitem__(self, name):
    return types.SimpleNamespace(value=getattr(self, name))


@pytest.mark.parametrize("retry", [False, True])
def test_the_command_hands_its_minutes_and_retries_on(retry, tmp_path, monkeypatch, capsys):
  file = tmp_path / "file.py"
  file.write_text(
    "from mixer_jax.study import Study\nfrom tests.study.grid import GRID\n"
    "def get_study():\n  return Study(**GRID, seeds=(0,))\n"
  )
  (tmp_path / "study").mkdir()
  opened = open_tiny(tmp_path / "study")
  opened.path(opened.runs[0]).mkdir()
  opened.finish(opened.runs[0], "no memory")
  seen = []

  class Recorded(runner.Runner):
    def __init__(self, record, parallel, deadline):
      super().__init__(record, parallel, deadline)
      seen.append((parallel, deadline - time.monotonic()))

    def run(self, runs):
      pass

  given = dict(study=str(file), workdir=str(tmp_path / "study"), set=[], run="*", parallel=2)
  given |= dict(max_minutes=2.0, retry_failed=retry, list=False)
  monkeypatch.setattr(command.flags, "FLAGS", Flags(**given))
  monkeypatch.setattr(command.runner, "Runner", Recorded)
  monkeypatch.setattr(command.signal, "signal", lambda *_: None)
  with pytest.raises(SystemExit) as ended:
    command.main([])
  ((parallel, seconds),) = seen
  assert parallel == 2 and 110 < seconds <= 120
  assert kinds(opened)["m1-sgd-seed0"] == ("interrupted" if retry else "failed")
  assert ended.value.code == 1
  assert ("m1-sgd-seed0  failed: no memory" in capsys.readouterr().out) == (not retry)
