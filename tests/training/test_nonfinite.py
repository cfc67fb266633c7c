"""Loss or update not finite: noticed at its step; the run stops, skips it, or goes back."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from docs.own_task import Derivative
from mixer_jax import experiment, optim, tasks
from mixer_jax.errors import Diverged
from mixer_jax.tasks import Metric
from mixer_jax.training import loop, nonfinite
from mixer_jax.training.checkpoint import Checkpoints
from mixer_jax.training.state import init_state
from mixer_jax.training.step import step_keys, update
from tests import children
from tests.conftest import optimizer_of, waves

EPOCHS, STEPS, BATCH = 3, 8, 32
MARK = 1e3  # of the first input of an example


def poison(number, *marked):
  """In a child: a training batch with so many marked examples is not a number."""
  split = Derivative.datasets

  def with_marks(self):
    splits = split(self)
    for row in marked:
      splits["train"].tree["x"][row, 0] = MARK
    return splits

  def prepared(self, key, examples, *, train):
    del key
    marks = examples["x"][:, 0] == MARK
    x = examples["x"].at[:, 0].set(jnp.where(marks, 0.0, examples["x"][:, 0]))
    if train:
      x = jnp.where(jnp.sum(marks) >= number, jnp.nan, x)
    return examples | {"x": x}

  Derivative.datasets, Derivative.prepare = with_marks, prepared


def order(seed, epoch, *restores):
  """The published order of examples, by NumPy."""
  return np.random.default_rng((seed, epoch, *restores)).permutation(STEPS * BATCH)


def meeting(a, b, *entropy):
  """The batch, from 0, in which two examples of an epoch meet; None if they do not."""
  places = np.argsort(order(*entropy))[[a, b]] // BATCH
  return int(places[0]) if places[0] == places[1] else None


# Two examples that meet in epoch 2 alone, and never after a first restore.
A, B = next(
  (a, b)
  for a in range(256)
  for b in range(a)
  if meeting(a, b, 0, 2) in (1, 2)
  and all(meeting(a, b, *e) is None for e in ((0, 1), (0, 3), (0, 2, 1), (0, 3, 1)))
)
BAD = STEPS + meeting(A, B, 0, 2) + 1


@pytest.fixture
def config():
  return waves(num_epochs=EPOCHS, steps_per_dispatch=4)


def test_a_run_stops_at_the_step_and_may_go_on_without_it(config, tmp_path):
  """The step is in the middle of a call of four."""
  path = tmp_path / "run"
  stopped = children.Child(config, path, poison, (2, A, B))
  assert stopped.wait() == 3
  line = stopped.error
  [row] = children.rows(path)
  assert f"the loss of step {BAD} is not finite (learning_rate=0.1); the evaluation at" in line
  assert f"at step 8 had train/error {row['train/error']:.4f}, train/loss" in line
  assert "last good checkpoint: that of step 8. Try a lower learning_rate, schedule" in line
  assert line.endswith("or on_nonfinite=skip, on_nonfinite=restore")
  saved = Checkpoints(path, read_only=True)
  assert (saved.latest(), saved.find("best")) == (8, 8)

  config.on_nonfinite = "skip"
  went_on = children.trained(config, path, poison, (2, A, B))
  assert "resumed from step 8" in went_on.out and "1 step skipped" in went_on.out
  assert [row.get("train/skipped") for row in children.rows(path)] == [None, 1, 1]
  with pytest.MonkeyPatch.context() as patch:
    for name in ("datasets", "prepare"):
      patch.setattr(Derivative, name, getattr(Derivative, name))  # to be put back
    poison(2, A, B)
    expected = by_hand(config)
    state = children.final_state(config, path)
  assert optax.tree.get_all_with_path(state.opt_state, "count")[0][1] == STEPS * EPOCHS - 1
  close = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5)
  jax.tree.map(close, (state.params, state.opt_state), expected)


def by_hand(config):
  """The steps one by one, without the batch in which the two examples meet."""
  run = experiment.build(config)
  state, examples = init_state(run), run.datasets["train"].tree

  @jax.jit
  def step(state, batch):
    return update(run, state, run.task.prepare(step_keys(state)[0], batch, train=True))[0]

  for epoch in range(1, EPOCHS + 1):
    for ids in order(0, epoch).reshape(STEPS, BATCH):
      if int(state.step) + 1 == BAD:
        state = state.replace(step=state.step + 1)
      else:
        state = step(state, jax.tree.map(lambda x, ids=ids: jnp.asarray(x[ids]), examples))
  return state.params, state.opt_state


@pytest.mark.thorough
def test_a_run_goes_back_and_takes_another_order(config, tmp_path):
  """It can be interrupted after that, too, and ends as if it had not been."""
  config.on_nonfinite = "restore"
  whole = children.trained(config, tmp_path / "whole", poison, (2, A, B))
  assert f"the loss of step {BAD} is not finite: back to step 8" in whole.out
  rows = children.rows(tmp_path / "whole")
  assert [(row["step"], row["restores"]) for row in rows] == [(8, 0), (16, 1), (24, 1)]
  assert all(np.isfinite(row["train/error"]) for row in rows)

  cut = children.Child(config, tmp_path / "parts", poison_and_signal, (20, 2, A, B))
  assert cut.wait() == 143, cut.err
  assert "back to step 8" in cut.out and "the checkpoint of step 20 is written" in cut.out
  children.trained(config, tmp_path / "parts", poison, (2, A, B))
  children.assert_same_run(config, tmp_path / "whole", tmp_path / "parts")


def poison_and_signal(step, *args):
  poison(*args)
  children.signal_at(step)


@pytest.mark.thorough
def test_it_does_not_go_back_for_ever(config, tmp_path):
  config.on_nonfinite = "restore"
  child = children.Child(config, tmp_path / "run", poison, (1, A))
  assert child.wait() == 3
  tries = [line for line in child.out.splitlines() if "back to step 0" in line]
  assert ["(try 1 of 3)" in tries[0], len(tries)] == [True, 3]
  line = child.error
  assert "after 3 other orders of examples from step 0 (learning_rate=0.1); nothing was" in line
  assert "last good checkpoint: none. Try" in line and line.endswith("or on_nonfinite=skip")


@pytest.mark.thorough
def test_it_does_not_skip_a_whole_epoch(config, tmp_path):
  config.on_nonfinite = "skip"
  child = children.Child(config, tmp_path / "run", poison, (0,))
  assert child.wait() == 3
  assert "the loss of step 8 is not finite, nor were the 7 before it" in child.error
  assert not children.rows(tmp_path / "run")


def test_the_line_names_the_numbers_of_both_sides_of_a_pair():
  run = experiment.build(waves("graft", **{"optimizer.direction.damping": 0.01}))
  rows = [{"step": 8, "train/loss": 1.5, "test/loss": 2.25, "test/error": 0.5}]
  error = nonfinite.diverged(nonfinite.Nonfinite("update", 9), run, init_state(run), rows, 8)
  assert isinstance(error, Diverged)
  numbers = "direction.damping=0.01, direction.learning_rate=0.05, magnitude.learning_rate=0.1"
  assert f"the update of step 9 is not finite ({numbers}); the evaluation at step 8" in str(error)
  assert (
    "train/loss 1.5000, test/loss 2.2500, test/error 0.5000; last good checkpoint: that of step 8"
    in str(error)
  )
  assert "a higher damping" in str(error)


@pytest.mark.parametrize("step, skipped", [(8, 4), (5, 0)])  # seen after its call; a test metric
def test_the_line_has_the_rate_of_the_step(step, skipped):
  """Linear warm-up over 15 steps: the fifth has a third of the rate."""
  run = experiment.build(waves(**{"schedule.warmup_steps": 15}))
  state = init_state(run).replace(step=jnp.int32(step), skipped=jnp.int32(skipped))
  error = nonfinite.diverged(nonfinite.Nonfinite("loss", 5), run, state, [], None)
  assert "the loss of step 5 is not finite (learning_rate=0.03333); nothing was evaluated" in str(
    error
  )


@pytest.mark.parametrize(
  "part, expected",
  [
    ("metrics", [False, True]),
    ("params", [True, False]),
    ("factors", [True, False]),
    ("nothing", [True, True]),
  ],
)
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_checks_look_at_everything(part, expected, value):
  trees = {p: {"a": jnp.ones((3, 2)), "count": jnp.array(7)} for p in ("metrics", "params")}
  trees["factors"] = (jnp.zeros(()), {"b": jnp.full((4, 4), 3e38, jnp.float32)})
  if part != "nothing":
    trees[part] = jax.tree.map(
      lambda x: x.at[(-1,) * x.ndim].set(value) if x.ndim else x, trees[part]
    )
  assert jax.jit(nonfinite.checks)(*trees.values()).tolist() == expected


def test_a_step_without_metrics_has_none_that_is_not_finite():
  assert nonfinite.checks({}, {"a": jnp.ones(3)}, ()).tolist() == [True, True]
  assert nonfinite.checks({"hits": jnp.array(3)}, {"a": jnp.full(3, np.nan)}, ()).tolist() == [
    True,
    False,
  ]


@pytest.mark.parametrize(
  "value, fine", [(-np.inf, True), (2.0, True), (np.nan, False), (np.inf, False)]
)
def test_the_largest_of_no_values_is_no_failure(value, fine):
  metrics = {"worst": tasks.Largest(jnp.float32(value)), "loss": tasks.WeightedSum.of(jnp.ones(3))}
  assert nonfinite.checks(metrics, {}, ()).tolist() == [fine, True]


@pytest.mark.thorough
def test_a_curvature_factor_that_overflows_is_left_out(tiny_config):
  """Pixels of 1e22: LayerNorm makes loss and gradients finite, the factor's squares overflow."""
  tiny_config.optimizer = optimizer_of("kfac")
  tiny_config.optimizer.update(factor_period=1, inverse_period=100)
  tiny_config.model.num_blocks = 0  # there is nothing between the stem and the head
  run = experiment.build(tiny_config)
  state = init_state(run)
  some = jax.tree.map(lambda x: x[:32], run.datasets["train"].tree)
  batch = run.task.prepare(jax.random.key(0), some, train=True)
  step = jax.jit(lambda state, batch: update(run, state, batch))
  state, passed = step(state, batch)
  assert passed.all()
  stem = jax.tree.map(lambda x: 1e-6 * x, state.params["stem"])
  state = state.replace(variables={"params": state.params | {"stem": stem}})
  before = state.opt_state.inner_state[0].factors
  state, passed = step(state, batch | {"image": 1e22 * batch["image"]})
  kfac = state.opt_state.inner_state[0]
  assert isinstance(kfac, optim.ScaleByKfacState) and passed.all()
  assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves((state.params, kfac)))
  jax.tree.map(np.testing.assert_array_equal, kfac.factors["stem"], before["stem"])
  assert not np.array_equal(kfac.factors["head"].inputs, before["head"].inputs)


@pytest.mark.parametrize("policy", ["stop", "restore"])
def test_a_loop_of_one_s_own_ends_in_one_line(policy):
  run = experiment.build(waves(on_nonfinite=policy, **{"optimizer.learning_rate": 1e30}))
  with pytest.raises(Diverged, match=r"^the (loss|update) of step \d+ is not finite ") as told:
    list(loop.evaluations(run))
  text = str(told.value)
  assert "\n" not in text and "on_nonfinite=skip" in text
  assert "checkpoint" not in text and "restore" not in text


def test_a_loop_of_one_s_own_heeds_the_task_s_complaint(monkeypatch):
  monkeypatch.setattr(Derivative, "complaint", lambda self, variables: "nothing is learned")
  found = loop.evaluations(experiment.build(waves()))
  assert next(found)[1]["step"] == 8  # the last evaluation is not lost
  with pytest.raises(Diverged, match="^stopped at step 8: nothing is learned$"):
    next(found)


def test_a_metric_that_is_better_when_lower_picks_its_lowest():
  assert Metric("error", higher_is_better=False).better(0.1, 0.2)
  run = experiment.build(waves(num_steps=3, eval_steps=1, **{"optimizer.learning_rate": 3.0}))
  rows = [row for _, row in loop.evaluations(run)]
  values = [row["test/error"] for row in rows]
  assert rows[-1]["test/best_error"] == min(values)
  assert rows[-1]["test/best_step"] == 1 + int(np.argmin(values))


def test_of_equal_evaluations_the_first_is_the_best():
  metric = Metric("error", higher_is_better=False)
  run = types.SimpleNamespace(task=types.SimpleNamespace(metrics=[metric]), selection="test")
  rows = []
  for step, value in ((1, 0.4), (2, 0.3), (3, 0.3), (4, 0.35)):
    state = types.SimpleNamespace(variables={"params": {}})
    trainer = types.SimpleNamespace(run=run, state=state, step=step, report=dict)
    rows.append(loop._row(trainer, {"test": lambda _, value=value: {"error": value}}, rows))
  assert [row["test/best_step"] for row in rows] == [1, 2, 2, 2]
  assert [row["test/best_error"] for row in rows] == [0.4, 0.3, 0.3, 0.3]


def test_a_row_has_the_numbers_that_the_quadratic_model_chose():
  """The damping changes by 0.95^5 at most, every fifth step; no momentum comes before step 1."""
  values = {"optimizer.quadratic_model": True, "optimizer.adaptive_damping": True}
  config = waves("kfac", num_steps=6, eval_steps=1, **values)
  config.optimizer.update(learning_rate=1.0, damping=0.5, weight_decay=0.0)
  rows = [row for _, row in loop.evaluations(experiment.build(config))]
  assert [row["damping"] for row in rows[:4]] == [0.5] * 4
  factor = 0.95**5
  allowed = [0.5, 0.5 * factor, 0.5 / factor]
  assert min(abs(rows[4]["damping"] - value) for value in allowed) < 1e-6
  assert rows[4]["damping"] == rows[5]["damping"]
  assert rows[0]["step_momentum"] == 0 and any(row["step_momentum"] for row in rows[1:])
  assert all(row["step_rate"] > 0 for row in rows)
