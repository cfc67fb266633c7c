"""Loss or update not finite: noticed at its step; the run stops, skips it, or goes back."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mixer_jax import checkpoint, divergence, experiment, optim, steps, workdir
from mixer_jax import config as config_lib
from mixer_jax.tasks import Classification
from tests import children

EPOCHS, STEPS, BATCH = 3, 8, 32


def poison(number):
  """In a child: a batch for training with so many white images is not a number."""
  batch = Classification.batch

  def poisoned(self, rng, images, labels, *, train):
    made = batch(self, rng, images, labels, train=train)
    if train:
      bad = jnp.sum(jnp.all(images == 255, axis=(1, 2, 3))) >= number
      made["image"] = jnp.where(bad, jnp.nan, made["image"])
    return made

  Classification.batch = poisoned


def order(seed, epoch, *restores):
  """The published order of examples, by NumPy."""
  return np.random.default_rng((seed, epoch, *restores)).permutation(STEPS * BATCH)


def meeting(a, b, *entropy):
  """The batch, from 0, in which two images of an epoch meet; None if they do not."""
  places = np.argsort(order(*entropy))[[a, b]] // BATCH
  return int(places[0]) if places[0] == places[1] else None


# Two images that meet in epoch 2 alone, and never after a first restore.
SEED, A, B = next(
  (0, a, b)
  for a in range(256)
  for b in range(a)
  if meeting(a, b, 0, 2) in (1, 2)
  and all(meeting(a, b, *e) is None for e in ((0, 1), (0, 3), (0, 2, 1), (0, 3, 1)))
)
BAD = STEPS + meeting(A, B, 0, 2) + 1


@pytest.fixture(scope="module")
def marked_npz(shapes_npz, tmp_path_factory):
  arrays = dict(np.load(shapes_npz))
  arrays["train_images"][[A, B]] = 255
  path = tmp_path_factory.mktemp("marked") / "marked.npz"
  np.savez(path, **arrays)
  return path


@pytest.fixture
def config(tiny_config, marked_npz):
  tiny_config.seed, tiny_config.num_epochs, tiny_config.steps_per_dispatch = SEED, EPOCHS, 4
  tiny_config.model.num_blocks = 1
  tiny_config.optimizer = config_lib.optimizer("sgd", learning_rate=0.1)
  tiny_config.data.update(dir=str(marked_npz), pad=0)
  return tiny_config


def one_error(child):
  assert "Traceback" not in child.err
  (line,) = [line for line in child.err.splitlines() if line.startswith("error: ")]
  return line


def test_a_run_stops_at_the_step_and_may_go_on_without_it(config, tmp_path):
  """The step is in the middle of a call of four."""
  path = tmp_path / "run"
  stopped = children.Child(config, path, poison, (2,))
  assert stopped.wait() == 3
  line = one_error(stopped)
  assert f"the loss of step {BAD} (epoch 2) is not finite; the epoch's finite steps have" in line
  assert "last good checkpoint: that of step 8. Try a lower learning_rate, schedule" in line
  assert "on_nonfinite=skip, on_nonfinite=restore" in line
  saved = checkpoint.Checkpoints(path, read_only=True)
  assert (saved.latest(), saved.find("best")) == (8, 8)
  assert len(children.rows(path)) == 1

  config.on_nonfinite = "skip"
  went_on = children.trained(config, path, poison, (2,))
  assert "resumed from step 8" in went_on.out and "1 step skipped" in went_on.out
  rows = children.rows(path)
  assert [row.get("train/skipped") for row in rows] == [None, 1, 0]
  params, opt_state = by_hand(config)
  assert optax.tree.get_all_with_path(opt_state, "count")[0][1] == STEPS * EPOCHS - 1
  expected = jax.tree.leaves((params, opt_state))
  arrays = [np.asarray(x) for x in children.final_arrays(config, path)]
  for x in expected:  # the rest of what is saved are the step and the key
    assert any(x.shape == y.shape and np.allclose(x, y, rtol=1e-3, atol=1e-5) for y in arrays)


def by_hand(config):
  """The steps one by one, without the batch in which the two images meet."""
  run = experiment.build(config)
  state, totals = steps.init_state(run), run.task.train_metrics.empty()
  images, labels = run.dataset.train.images, run.dataset.train.labels

  @jax.jit
  def step(state, ids):
    batch = run.task.batch(
      steps.step_keys(state)[0], jnp.asarray(images)[ids], jnp.asarray(labels)[ids], train=True
    )
    return steps.update(run, state, totals, batch)[0]

  for epoch in range(1, EPOCHS + 1):
    for ids in jnp.asarray(order(SEED, epoch)).reshape(STEPS, BATCH):
      if int(state.step) + 1 == BAD:
        state = state.replace(step=state.step + 1)
      else:
        state = step(state, ids)
  return state.params, state.opt_state


def test_a_run_goes_back_and_takes_another_order(config, tmp_path):
  """It can be interrupted after that, too, and ends as if it had not been."""
  config.on_nonfinite = "restore"
  whole = children.trained(config, tmp_path / "whole", poison, (2,))
  assert f"the loss of step {BAD} is not finite: back to step 8" in whole.out
  rows = children.rows(tmp_path / "whole")
  assert [(row["epoch"], row["restores"]) for row in rows] == [(1, 0), (2, 1), (3, 1)]
  assert all(np.isfinite(row["train/loss"]) for row in rows)

  # Windows that a signal may follow: one of epochs 1, 2 (cut short by the step), 2 and 3 each.
  cut = children.Child(config, tmp_path / "parts", poison_and_signal, (2, 3))
  assert cut.wait() == 143, cut.err
  assert "back to step 8" in cut.out and "the checkpoint of step" in cut.out
  children.trained(config, tmp_path / "parts", poison, (2,))
  children.assert_same_run(config, tmp_path / "whole", tmp_path / "parts")


def poison_and_signal(number, window):
  poison(number)
  children.signal_at(window)


def test_it_does_not_go_back_for_ever(config, tmp_path):
  config.on_nonfinite = "restore"
  child = children.Child(config, tmp_path / "run", poison, (1,))
  assert child.wait() == 3
  tries = [line for line in child.out.splitlines() if "back to step 0" in line]
  assert ["(try 1 of 3)" in tries[0], len(tries)] == [True, 3]
  line = one_error(child)
  assert "after 3 other orders of examples from step 0; " in line
  assert "last good checkpoint: none. Try" in line and line.endswith("or on_nonfinite=skip")


def test_it_does_not_skip_a_whole_epoch(config, tmp_path):
  config.on_nonfinite = "skip"
  child = children.Child(config, tmp_path / "run", poison, (0,))
  assert child.wait() == 3
  assert "the loss of step 8 (epoch 1) is not finite, nor were the 7 before it" in one_error(child)
  assert not children.rows(tmp_path / "run")


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
  assert jax.jit(divergence.checks)(*trees.values()).tolist() == expected


def test_a_lost_curvature_factor_is_noticed_before_it_is_used(tiny_config):
  """Pixels of 1e22: LayerNorm makes loss and gradients finite, the factor's squares overflow."""
  options = dict(factor_period=1, inverse_period=100)
  tiny_config.optimizer = config_lib.optimizer("kfac", learning_rate=0.1, **options)
  tiny_config.model.num_blocks = 0  # there is nothing between the stem and the head
  run = experiment.build(tiny_config)
  state, totals = steps.init_state(run), run.task.train_metrics.empty()
  split = run.dataset.train
  batch = run.task.batch(jax.random.key(0), split.images[:32], split.labels[:32], train=True)
  step = jax.jit(lambda state, batch: steps.update(run, state, totals, batch))
  state, _, passed = step(state, batch)
  assert passed.all()
  stem = jax.tree.map(lambda x: 1e-6 * x, state.params["stem"])
  state = state.replace(params=state.params | {"stem": stem})
  state, _, passed = step(state, batch | {"image": 1e22 * batch["image"]})
  kfac = state.opt_state[0]
  assert isinstance(kfac, optim.ScaleByKfacState)
  finite = lambda tree: all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(tree))
  assert finite(state.params) and finite(kfac.inverses) and not finite(kfac.factors)
  assert passed.tolist() == [True, False]


def test_runs_from_before_the_field_resume(config, tmp_path):
  config.data.dir = "elsewhere"
  workdir.store_config(tmp_path, config, started=False)
  stored = tmp_path / workdir.CONFIG
  stored.write_text(stored.read_text().replace('  "on_nonfinite": "stop",\n', ""))
  assert "on_nonfinite" not in stored.read_text()
  workdir.store_config(tmp_path, config, started=True)
  assert workdir.load_config(tmp_path).on_nonfinite == "stop"
