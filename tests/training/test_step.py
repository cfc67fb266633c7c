"""One step: weights, accumulation, devices, order, and the clock of many."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixer_jax import experiment
from mixer_jax.data import feed
from mixer_jax.runtime import mesh as mesh_lib
from mixer_jax.training.checkpoint import Checkpoints
from mixer_jax.training.evaluator import Evaluator
from mixer_jax.training.state import init_state, state_shapes
from mixer_jax.training.step import step_keys, update
from mixer_jax.training.trainer import Trainer
from tests.conftest import optimizer_of, waves


def advanced(config, steps=3):
  """State and row after some steps, without a directory."""
  config.num_steps = config.eval_steps = config.checkpoint_steps = steps
  run = experiment.build(config)
  trainer = Trainer(run, init_state(run))
  trainer.advance()
  assert trainer.step == int(trainer.state.step) == steps
  row = trainer.report()
  return trainer.state, {k: v for k, v in row.items() if k.startswith("train/")}


def assert_close(one, other, rtol=1e-4, atol=1e-5):
  (a, a_row), (b, b_row) = one, other
  close = lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol)
  jax.tree.map(close, a.params, b.params)
  assert a_row == pytest.approx(b_row, rel=rtol)


def test_accumulation_saves_memory():
  """Activations of an eighth of the batch are alive at a time."""
  temporary = {}
  for parts in (1, 8):
    config = waves(batch_size=2048, accum_steps=parts, **{"data.examples": 2048})
    run = experiment.build(config)
    batch = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct((2048, *x.shape[1:]), x.dtype), run.datasets["train"].tree
    )
    step = jax.jit(lambda s, batch, run=run: update(run, s, batch))
    program = step.lower(jax.eval_shape(lambda run=run: init_state(run)), batch).compile()
    temporary[parts] = program.memory_analysis().temp_size_in_bytes
  assert temporary[8] < 0.5 * temporary[1]


def test_accumulation_weighs_parts_by_their_weights():
  """Every fourth example has one weighted point of 8: its part counts an eighth."""
  config = waves(**{"optimizer.momentum": 0.0})
  rng = np.random.default_rng(0)
  batch = {name: rng.normal(size=(32, 8)).astype(np.float32) for name in ("x", "y")}
  batch["mask"] = np.ones((32, 8), np.float32)
  batch["mask"][::4, 1:] = 0
  batch["y"][::4] += 5  # so that a wrong weight is seen
  ends, metrics = [], []
  for parts in (1, 4):
    config.accum_steps = parts
    run = experiment.build(config)
    start = init_state(run)
    state, checks = jax.jit(lambda s, run=run: update(run, s, batch))(start)
    assert checks.all()
    ends.append((start.params, state.params))
    metrics.append(float(state.metrics["error"].value()))

  # By hand: the gradient of the mean over all weights, and that of a mean of the parts' means.
  def mean(params, rows):
    part = {name: jnp.asarray(x)[rows] for name, x in batch.items()}
    return run.task.loss({"params": params}, part, jax.random.key(0))[0].value()

  (start, one), (_, four) = ends
  gradient = jax.jit(jax.grad(mean))
  whole = gradient(start, np.arange(32))
  parts = [gradient(start, np.arange(i, 32, 4)) for i in range(4)]
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
  for moved in (one, four):
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, start, whole)
    jax.tree.map(close, moved, expected)
  wrong = jax.tree.map(lambda *g: sum(g) / 4, *parts)
  assert not np.allclose(wrong["Dense_2"]["bias"], whole["Dense_2"]["bias"], rtol=0.1)
  squares = np.square(run.task.predict({"params": start}, batch).outputs - batch["y"])
  error = np.sqrt(np.sum(squares * batch["mask"]) / np.sum(batch["mask"]))
  assert metrics == pytest.approx([error, error], rel=1e-5)


def test_accumulation_keeps_the_types_of_the_state_where_jax_has_64_bits():
  config = waves("adam", accum_steps=4)
  batch = {name: np.ones((32, 8), np.float32) for name in ("x", "y", "mask")}
  with jax.enable_x64(True):
    run = experiment.build(config)
    start = jax.eval_shape(lambda: init_state(run))
    state, _ = jax.eval_shape(lambda s: update(run, s, batch), start)
  types = lambda tree: jax.tree.map(lambda x: x.dtype, tree)
  assert types((state.params, state.opt_state)) == types((start.params, start.opt_state))


@pytest.mark.slow
def test_accumulation_of_images_equals_one_batch(tiny_config):
  tiny_config.optimizer, tiny_config.model.num_blocks = optimizer_of("sgd"), 1
  one = advanced(tiny_config)
  tiny_config.accum_steps = 4
  assert_close(advanced(tiny_config), one)


@pytest.mark.thorough
def test_a_set_that_does_not_fit_makes_the_steps_of_a_resident_one(monkeypatch):
  resident = advanced(waves())
  monkeypatch.setattr(feed, "DEVICE_BYTES", 0)
  assert_close(advanced(waves(steps_per_dispatch=3)), resident)


def test_one_seed_is_one_run():
  (a, _), (b, _) = advanced(waves("adam")), advanced(waves("adam"))
  assert all(jax.tree.leaves(jax.tree.map(np.array_equal, a, b)))
  c, _ = advanced(waves("adam", seed=1))
  assert not np.array_equal(a.params["Dense_0"]["kernel"], c.params["Dense_0"]["kernel"])


def test_the_examples_of_a_step_are_a_function_of_seed_and_step():
  """SGD by hand with the published order and the published keys: any process can tell them."""
  config = waves(num_steps=10, eval_steps=10, checkpoint_steps=10, seed=3)
  run = experiment.build(config)
  trainer = Trainer(run, init_state(run))
  trainer.advance()
  state, split = init_state(run), run.datasets["train"].tree
  step = jax.jit(lambda state, batch: update(run, state, batch)[0])
  for number in range(10):
    epoch, row = divmod(number, 8)
    order = np.random.default_rng((3, epoch + 1)).permutation(256).reshape(8, 32)
    batch = jax.tree.map(lambda x, ids=order[row]: jnp.asarray(x[ids]), split)
    key, _, _ = step_keys(state)
    state = step(state, run.task.prepare(key, batch, train=True))
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
  jax.tree.map(close, state.params, trainer.state.params)


@pytest.fixture
def split_all(monkeypatch):
  """All parameters can be split over the axis "model"."""
  monkeypatch.setattr(mesh_lib, "_SPLIT_FROM", 1)


@pytest.mark.parametrize("name", ["sgd", "kfac", pytest.param("adam", marks=pytest.mark.slow)])
@pytest.mark.first(1)
def test_any_mesh_makes_the_same_steps(name, split_all):
  """Three steps: a chaotic run amplifies rounding, and its end tells of the processor."""
  one = advanced(waves(name))
  for data, model in ((8, 1), (2, 4)):
    mesh = {"mesh.data": data, "mesh.model": model}
    assert_close(advanced(waves(name, **mesh)), one, rtol=2e-3, atol=2e-4)


def test_the_first_step_on_eight_devices_is_that_of_one():
  """Loss and parameters to 1e-5, before rounding grows."""
  one, eight = (advanced(waves("kfac", **{"mesh.data": n}), steps=1) for n in (1, 8))
  assert_close(eight, one, rtol=1e-5, atol=1e-6)


_FAMILY = {
  "ekfac": ("kfac", {"eigenvalues": "batch", "token_averaging": "expand"}),
  "ekfac of examples": ("kfac", {"eigenvalues": "examples", "inverse_period": 4}),
  "kfac_adam": ("kfac_adam", {}),
  "kfac_muon": ("kfac_muon", {}),
}
# SOAP and Shampoo are left out: the basis of a single gradient is arbitrary where that has no rank,
# so another order of a sum, even of the parts of a batch, gives other steps.


@pytest.mark.parametrize("name", _FAMILY)
@pytest.mark.thorough
def test_any_mesh_makes_the_same_steps_of_the_family(name, split_all):
  optimizer, options = _FAMILY[name]
  fields = {f"optimizer.{key}": value for key, value in options.items()}
  one = advanced(waves(optimizer, **fields))
  mesh = {"mesh.data": 2, "mesh.model": 4}
  assert_close(advanced(waves(optimizer, **fields, **mesh)), one, rtol=2e-3, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adam", "kfac"])
def test_any_mesh_makes_the_same_steps_of_a_mixer(name, tiny_config, split_all):
  tiny_config.optimizer, tiny_config.batch_size = optimizer_of(name), 24
  one = advanced(tiny_config)
  for mesh in ((8, 1), (2, 4)):
    tiny_config.mesh.data, tiny_config.mesh.model = mesh
    assert_close(advanced(tiny_config), one, rtol=2e-3, atol=2e-4)


def test_many_steps_a_dispatch_are_the_same_steps():
  one = advanced(waves(), steps=12)
  many = advanced(waves(steps_per_dispatch=4), steps=12)
  assert_close(many, one, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("name", ["adam", "kfac"])
@pytest.mark.first(1)
def test_the_model_axis_splits_parameters_and_optimizer_state(name, split_all):
  config = waves(name, **{"mesh.data": 2, "mesh.model": 4})
  state = init_state(experiment.build(config))

  def bytes_on_a_device(tree):
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))

  def divisible(x):
    return any(size % 4 == 0 for size in x.shape)

  for tree in (state.params, state.opt_state):
    leaves = jax.tree.leaves(tree)
    expected = sum(x.nbytes // (4 if divisible(x) else 1) for x in leaves)
    assert bytes_on_a_device(tree) == expected
  moved, _ = advanced(config, steps=1)  # the compiled step leaves each array where it was
  jax.tree.map(lambda a, b: a.sharding == b.sharding or 1 / 0, moved.opt_state, state.opt_state)
  # Odd sizes are those of K-FAC's factors of layers with a bias alone.
  whole = sum(x.nbytes for x in jax.tree.leaves(state.params))
  assert bytes_on_a_device(state.params) < 0.3 * whole


@pytest.mark.parametrize("meshes", [((2, 4), (1, 1)), ((1, 1), (4, 2)), ((8, 1), (2, 2))], ids=str)
@pytest.mark.first(1)
def test_a_checkpoint_is_restored_onto_other_devices(meshes, split_all, tmp_path):
  before, after = (
    experiment.build(waves("adam", **{"mesh.data": data, "mesh.model": model}))
    for data, model in meshes
  )
  state = init_state(before)
  saved = Checkpoints(tmp_path)
  saved.save(5, state, 1.5, 0.5)
  saved.wait()
  shapes = state_shapes(after)
  restored, seconds = saved.restore(5, shapes)
  saved.close()
  assert seconds == 1.5
  jax.tree.map(np.testing.assert_array_equal, restored, state)
  pairs = zip(*map(jax.tree.leaves, (restored, shapes)))
  assert all(x.sharding == s.sharding for x, s in pairs)
  scores = [Evaluator(run)(s.variables)["error"] for run, s in ((before, state), (after, restored))]
  assert scores[0] == pytest.approx(scores[1], rel=1e-5)


def test_a_run_resumed_in_mid_window_counts_its_steps():
  """Three steps one by one, then in windows of four: the state is that of single steps."""
  alone = experiment.build(waves(steps_per_dispatch=1))
  whole = Trainer(alone, init_state(alone))
  whole.advance()
  first, asked = Trainer(alone, init_state(alone)), iter([False, False, True])
  first.advance(lambda: next(asked))
  assert first.step == int(first.state.step) == 3
  run = experiment.build(waves(steps_per_dispatch=4))
  rest = Trainer(run, first.state)
  rest.advance()
  assert rest.window == 4 and rest.step == int(rest.state.step) == whole.step == 8
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
  jax.tree.map(close, rest.state.params, whole.state.params)
