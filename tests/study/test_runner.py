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

from mixer_jax.rundir import lock, metrics_file
from mixer_jax.study import Study, Tuning, record, runner
from mixer_jax.study import __main__ as command
from tests.study.grid import GRID, errors

# Stands for `mixer_jax.main` below: it writes an epoch's row every `pause` seconds, resumes after
# the rows that are there, stops by SIGTERM, and executes a line of its own.
FAKE = """
import json, os, pathlib, signal, sys, time
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
    self.started, self.chosen = [], {}
    self._fake = lambda run: [
      *(sys.executable, "-S", "-c", FAKE, str(opened.path(run)), "3"),
      *(str((values or {}).get(run.name, 0.5)), str(pause)),
      *(opened.primary.name, (code or {}).get(run.name, "")),
    ]

  def command(self, run, settings):
    self.chosen[run.name] = settings
    self.started.append(run.name)
    return self._fake(run)


def fake(opened, runs=None, **fields):
  """Runs some or all runs; the runner."""
  fakes = Fakes(opened, **fields)
  fakes.run(opened.runs if runs is None else runs)
  return fakes


def begin(path, **fields):
  return record.open_study(path, Study(**GRID | {"seeds": (0,)} | fields), "f.py", [])


@pytest.fixture
def opened(tmp_path):
  """Four runs, m1-sgd-seed0, m1-adam-seed0 and the same of m2."""
  return begin(tmp_path)


def kinds(opened):
  return {run.name: opened.state(run).kind for run in opened.runs}


def test_each_run_is_run_once(opened, capsys):
  assert set(kinds(opened).values()) == {"waiting"}
  fake(opened, opened.runs[:1])
  assert list(kinds(opened).values()) == ["done", "waiting", "waiting", "waiting"]
  assert fake(opened).started == ["m1-adam-seed0", "m2-sgd-seed0", "m2-adam-seed0"]
  assert set(kinds(opened).values()) == {"done"}
  said = "m2-adam-seed0: epoch 3 of 3  test top1 50.00%  1.0 s\nm2-adam-seed0: done"
  assert said in capsys.readouterr().out


def test_failures_are_recorded_with_the_reason_of_the_last_attempt_and_stop_nothing(opened):
  failures = {
    "m1-sgd-seed0": "print('error: the loss of step 1 is not finite'); sys.exit(3)",
    "m1-adam-seed0": "os.kill(os.getpid(), 9)",
    "m2-sgd-seed0": "sys.exit('MemoryError: 16 GiB\\n---\\nFor simplicity, JAX ...')",
    "m2-adam-seed0": "print('nothing was written'); sys.exit(0)",
  }
  fake(opened, code=failures)
  log = f"{opened.directory}/m1-adam-seed0/log.txt"
  assert {run.name: opened.state(run) for run in opened.runs} == {
    "m1-sgd-seed0": ("failed", "", "the loss of step 1 is not finite"),
    "m1-adam-seed0": ("failed", "", f"ended by SIGKILL; see {log}"),
    "m2-sgd-seed0": ("failed", "", "exit code 1: MemoryError: 16 GiB"),
    "m2-adam-seed0": ("failed", "", "exit code 0: nothing was written"),
  }
  assert not fake(opened).started
  first = opened.runs[0]
  opened.forget(first)
  fake(opened, code={first.name: "print('second'); sys.exit(3)"})
  assert opened.state(first).reason == "exit code 3: second"
  opened.forget(first)
  assert fake(opened).started == [first.name] and opened.state(first).kind == "done"


MEET = """
(path.parent / path.name[:2]).touch()
while not all((path.parent / name).exists() for name in ("m1", "m2")):
  time.sleep(0.01)
"""


def test_two_at_a_time_overlap(opened):
  runs = [run for run in opened.runs if run.cell[1] == "sgd"]
  fake(opened, runs, parallel=2, code={run.name: MEET for run in runs})  # each waits for the other
  assert [opened.state(run).kind for run in runs] == ["done", "done"]


@pytest.mark.skipif(
  not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
  reason="needs two processors",
)
def test_processes_share_the_processors(opened):
  tell = "time.sleep(0.2); (path / 'cpus').write_text(json.dumps(list(os.sched_getaffinity(0))))"
  runs = opened.runs[:2]
  fake(opened, runs, parallel=2, code={run.name: tell for run in runs}, pause=0.1)
  a, b = (set(json.loads((opened.path(r) / "cpus").read_text())) for r in runs)
  assert a and b and not a & b and a | b <= os.sched_getaffinity(0)


def test_the_deadline_stops_runs_and_the_next_call_resumes_them(opened, capsys):
  once = "sleep = time.sleep; time.sleep = lambda _: sleep(60 if metrics.exists() else 0)"
  late = fake(opened, deadline=time.monotonic() + 3, code={"m1-sgd-seed0": once})
  assert late.started == ["m1-sgd-seed0"] and late.out_of_time
  assert opened.state(opened.runs[0]) == ("interrupted", "epoch 1 of 3", "")
  assert "m1-sgd-seed0: stopped after epoch 1 of 3\n" in capsys.readouterr().out
  fake(opened)
  assert [row["epoch"] for row in metrics_file.read(opened.path(opened.runs[0]))] == [1, 2, 3]
  assert set(kinds(opened).values()) == {"done"}


@pytest.fixture
def interrupt():
  """Sends this process signals after some seconds; both end it as Ctrl-C, as in study.__main__."""
  numbers = signal.SIGINT, signal.SIGTERM  # a shell's background jobs ignore SIGINT
  before = {n: signal.signal(n, signal.default_int_handler) for n in numbers}
  yield lambda number, seconds: threading.Timer(seconds, os.kill, (os.getpid(), number)).start()
  for n, handler in before.items():
    signal.signal(n, handler)


def test_an_interruption_after_the_deadline_does_not_ask_a_run_twice(opened, interrupt):
  tell = "(path / 'asked').open('a').write('x')"
  saves = f"signal.signal(signal.SIGTERM, lambda *_: ({tell}, time.sleep(2.0), sys.exit(143)))"
  interrupt(signal.SIGINT, 2.0)
  late = dict(deadline=time.monotonic() + 1.0, pause=60.0, code={"m1-sgd-seed0": saves})
  with pytest.raises(KeyboardInterrupt):
    fake(opened, opened.runs[:1], **late)
  assert (opened.directory / "m1-sgd-seed0" / "asked").read_text() == "x"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.thorough
def test_a_second_interruption_ends_all_processes(opened, interrupt, number):
  for seconds in (1.0, 2.5):
    interrupt(number, seconds)
  deaf = {"m1-adam-seed0": "signal.signal(signal.SIGTERM, signal.SIG_IGN)"}
  began = time.monotonic()
  with pytest.raises(KeyboardInterrupt):
    fake(opened, parallel=2, pause=60.0, code=deaf)
  assert 2.5 <= time.monotonic() - began < 30
  assert sorted(kinds(opened).values()) == ["interrupted"] * 2 + ["waiting"] * 2  # no lock is held


def test_a_run_that_somebody_stops_has_not_failed(opened):
  ends = ("sys.exit(138)", "sys.exit(143)", "os.kill(os.getpid(), 15)")
  code = {
    run.name: f"signal.signal(signal.SIGTERM, signal.SIG_DFL); {end}"
    for run, end in zip(opened.runs, ends)
  }
  fake(opened, code=code)
  assert list(kinds(opened).values()) == ["interrupted"] * 3 + ["done"]


class Flags(types.SimpleNamespace):
  """Flags of the command, as absl has them."""

  def __getitem__(self, name):
    return types.SimpleNamespace(value=getattr(self, name))


@pytest.fixture
def call(opened, monkeypatch, tmp_path_factory):
  """Calls the command; its exit code, or None if it only lists."""
  file = tmp_path_factory.mktemp("file") / "study.py"
  file.write_text(
    "from mixer_jax.study import Study\nfrom tests.study.grid import GRID\n"
    "def get_study():\n  return Study(**GRID, seeds=(0,))\n"
  )
  monkeypatch.setattr(command.signal, "signal", lambda *_: None)

  def call(code=None, **flags):
    given = dict(study=str(file), workdir=str(opened.directory), set=[], run="*", parallel=1)
    given |= dict(max_minutes=None, retry_failed=False, list=False)
    monkeypatch.setattr(command.flags, "FLAGS", Flags(**given | flags))
    fakes = lambda record, *args: Fakes(record, *args, code=code)
    monkeypatch.setattr(command.runner, "Runner", fakes)
    try:
      command.main([])
    except SystemExit as ended:
      return ended.code

  return call


def test_the_exit_code_tells_whether_all_is_done(opened, call, capsys):
  failing = {"m1-sgd-seed0": "print('error: no memory'); sys.exit(1)"}
  assert call(max_minutes=0.0) == 0 and set(kinds(opened).values()) == {"waiting"}
  assert "time is up, the same command goes on: 4 waiting" in capsys.readouterr().out
  assert call({"m1-adam-seed0": "sys.exit(143)"}, run="m1-adam-*") == 1  # interrupted
  assert call(failing, parallel=2) == 1
  assert list(kinds(opened).values()) == ["failed", "done", "done", "done"]
  assert call(run="m2-*,m1-adam-*") == 0
  assert call() == 1 and "m1-sgd-seed0  failed: no memory" in capsys.readouterr().out
  assert call(retry_failed=True) == 0 and set(kinds(opened).values()) == {"done"}


def test_listing_writes_nothing(opened, call, capsys):
  files = lambda: [(p, p.stat().st_mtime_ns) for p in sorted(opened.directory.rglob("*"))]
  before = files()
  call(list=True, run="m1-*")
  assert capsys.readouterr().out == "m1-sgd-seed0  waiting\nm1-adam-seed0  waiting\n"
  assert files() == before


def test_a_run_is_trained_by_one_process_only(opened, capsys):
  first = opened.runs[0]
  opened.path(first).mkdir()
  held = lock.hold(opened.path(first))
  assert opened.state(first).kind == "running"
  assert fake(opened, opened.runs[:2]).started == ["m1-adam-seed0"]
  assert "m1-sgd-seed0: another process runs it" in capsys.readouterr().out
  os.close(held)
  assert opened.state(first).kind == "interrupted"


def test_the_lock_outlives_the_one_who_took_it(tmp_path):
  held = lock.hold(tmp_path)
  child = subprocess.Popen(["sleep", "60"], pass_fds=(held,))
  os.close(held)
  assert lock.hold(tmp_path) is None
  child.kill()
  child.wait()
  assert lock.hold(tmp_path) is not None


def rates(*values, **fields):
  return Tuning({"sgd": [{"optimizer.learning_rate": rate} for rate in values]}, **fields)


def tuned(path, **fields):
  """The record of a study of one tuned optimizer, its tries and its other runs."""
  axes = {"model": ("m1",), "optimizer": ("sgd",)}
  opened = begin(path, **dict(axes=axes, tuning=rates(0.1, 0.2), seeds=(0, 1)) | fields)
  both = ([run for run in opened.runs if run.tunes == tunes] for tunes in (True, False))
  return opened, *both


def test_tuning_chooses_by_the_last_evaluation(tmp_path):
  candidates = {
    "sgd": [{"optimizer.learning_rate": r} for r in (0.1, 0.2, 0.3)],
    "adam": [{"optimizer.learning_rate": r, "optimizer.b1": 0.8} for r in (0.01, 0.02, 0.03)],
  }
  axes = {"model": ("m1",), "optimizer": ("sgd", "adam")}
  opened, tries, finals = tuned(tmp_path, axes=axes, tuning=Tuning(candidates))
  for run in tries:
    data = opened.config(run).data
    assert (data.train_split, data.test_split) == ("train[:90%]", "train[90%:]")
  assert not fake(opened, finals).started  # nothing is chosen yet
  values = {"tune-m1-sgd-1": 0.7, "tune-m1-adam-2": 0.9, "tune-m1-adam-0": 0.95}
  broken = {"tune-m1-adam-0": "print('error: the loss is nan'); sys.exit(3)"}
  fake(opened, tries, values=values, code=broken)
  best = {"optimizer.learning_rate": 0.03, "optimizer.b1": 0.8}
  assert fake(opened, finals).chosen["m1-adam-seed1"] == best
  sgd, adam = (opened.trials(("m1", optimizer)) for optimizer in ("sgd", "adam"))
  assert sgd[0]["run"] == "tune-m1-sgd-1"
  assert (adam[0]["run"], adam[0]["settings"]) == ("tune-m1-adam-2", best)
  shown = {t["run"]: t.get("last", t.get("failed")) for t in adam}
  assert shown == {
    "tune-m1-adam-0": "the loss is nan",
    "tune-m1-adam-1": 0.5,
    "tune-m1-adam-2": 0.9,
  }
  words = runner.Runner(opened).command(opened.runs[-1], best)
  assert words[1:4] == ["-m", "mixer_jax.main", "--config=f.py:m1-adam-seed1"]
  assert set(words[5:]) == {"--config.optimizer.learning_rate=0.03", "--config.optimizer.b1=0.8"}
  assert {opened.state(run).kind for run in finals} == {"done"}
  # A choice that runs were begun with stays: its failed candidates are not tried again.
  (opened.path(finals[-1]) / "config.json").write_text(json.dumps(finals[-1].config))
  for run in tries:
    opened.forget(run)
  kinds_of = lambda optimizer: [opened.state(r).kind for r in tries if r.cell[1] == optimizer]
  assert (kinds_of("sgd"), kinds_of("adam")) == (["interrupted"] * 3, ["failed", "done", "done"])


def test_a_cell_whose_tuning_failed_is_told_and_can_be_retried(tmp_path):
  opened, tries, finals = tuned(tmp_path)
  fake(opened, code={run.name: "sys.exit(3)" for run in tries})
  assert {opened.state(r).reason for r in finals} == {"no candidate of its tuning was finished"}
  for run in opened.runs:
    opened.forget(run)
  fake(opened, tries)
  fake(opened, finals)
  assert set(kinds(opened).values()) == {"done"}


def test_a_try_that_failed_for_another_reason_is_no_lost_one(tmp_path):
  """Its cell is decided when it has been run again."""
  opened, tries, finals = tuned(tmp_path)
  fake(opened, tries, code={tries[1].name: "os.kill(os.getpid(), 9)"})
  assert opened.trials(("m1", "sgd")) is None
  assert not fake(opened, finals).started
  assert opened.forget(tries[1])
  fake(opened, tries, values={tries[1].name: 0.9})
  assert opened.trials(("m1", "sgd"))[0]["run"] == tries[1].name


def test_a_mistake_that_all_runs_share_ends_the_call(opened):
  wrong = {run.name: "print('error: data.dir is missing'); sys.exit(2)" for run in opened.runs}
  fakes = fake(opened, code=wrong)
  assert len(fakes.started) == 3 and fakes.gave_up and kinds(opened)["m2-adam-seed0"] == "waiting"
  for run in opened.runs[:3]:
    opened.forget(run)
  fakes = fake(opened, code=dict(list(wrong.items())[::2]))
  assert len(fakes.started) == 4 and not fakes.gave_up  # a good run lies between the mistakes


def test_a_full_disk_leaves_runs_interrupted(opened, capsys):
  full = "print('error: DIR cannot be written: No space left on device'); sys.exit(75)"
  fakes = fake(opened, code={run.name: full for run in opened.runs})
  assert fakes.gave_up and [kinds(opened)[name] for name in fakes.started] == 3 * ["interrupted"]
  assert f"{fakes.started[0]}: stopped: DIR cannot be written: No space" in capsys.readouterr().out
  fake(opened)
  assert set(kinds(opened).values()) == {"done"}


def test_any_task_is_tuned_by_its_own_metric(tmp_path, capsys):
  tuning = rates(0.1, 0.2, 0.3, hold_out={"points.fold": "last"}, seed=7)
  fields = dict(config=errors, axes={"optimizer": ("sgd",)}, seeds=(0,))
  opened, tries, _ = tuned(tmp_path, tuning=tuning, **fields)
  fake(opened, tries, values={"tune-sgd-0": 0.3, "tune-sgd-1": 0.02, "tune-sgd-2": 0.1})
  assert opened.trials(("sgd",))[0]["run"] == "tune-sgd-1"
  configs = [opened.config(run) for run in opened.runs]
  assert [config.points.fold for config in configs] == ["last"] * 3 + ["test"]
  assert [config.seed for config in configs] == [7, 7, 7, 0]
  assert "tune-sgd-1: step 30 of 30  held-out error 0.02  1.0 s\n" in capsys.readouterr().out


def test_settings_are_chosen_by_another_number_or_split_of_the_last_row(tmp_path, capsys):
  """The error of the second is the least, the training loss of the first."""
  tuning = rates(0.1, 0.2, hold_out={}, metric="train/loss")
  fields = dict(config=errors, axes={"optimizer": ("sgd",)}, seeds=(0,))
  opened, tries, _ = tuned(tmp_path, tuning=tuning, **fields)
  code = {}
  for run, loss, error in zip(tries, (1e-3, 1e-2), (0.3, 0.1)):
    row = {"step": 30, "epoch": 1, "seconds": 1.0, "test/error": 9.0, "train/loss": loss}
    row = json.dumps(row | {"validation/error": error, "validation/best_step": 30}) + "\n"
    code[run.name] = f"(path / 'metrics.jsonl').write_text({row!r}); sys.exit(0)"
  fake(opened, tries, code=code)
  first, second = opened.trials(("sgd",))
  assert (first["run"], first["last"], second["last"]) == ("tune-sgd-0", 1e-3, 1e-2)
  assert "held-out error 0.3" in capsys.readouterr().out
