"""Functions of several channels: velocities on a square, and what each model makes of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import io

import mixer_jax
from mixer_jax import config as config_lib
from mixer_jax import experiment
from mixer_jax.errors import UserError
from mixer_jax.rundir import metrics_file
from mixer_jax.tasks.operator_learning import losses
from mixer_jax.training import contract, loop, restore
from tests.tasks.operator_learning.functions_on_a_circle import waves


def velocities(seed, number, points):
  """Velocities [n, s, s, 2] on a torus, and the operator (v, w) -> (2 w, v moved by a quarter)."""
  one, moved = (x.reshape(2, number, points) for x in waves(seed, 2 * number, points))
  v, w = one[:, :, :, None] * np.cos(2 * np.pi * np.arange(points) / points)
  v_moved = moved[0][:, :, None] / 2 * np.cos(2 * np.pi * np.arange(points) / points)
  stack = lambda *x: np.stack(x, -1).astype(np.float32)
  return stack(v, w), stack(2 * w, v_moved)


@pytest.fixture
def torus(config, tmp_path):
  for name, seed, number in (("train", 0, 64), ("test", 1, 21)):
    a, u = velocities(seed, number, 8)
    io.savemat(tmp_path / f"{name}.mat", {"before": a, "after": u})
  config.model = config_lib.default("operator_learning", "fno_2d").model
  config.model.update(hidden_dim=8, modes=4, num_blocks=1, mlp_dim=16, padding=0)
  config.data.update(dir=str(tmp_path), train_split="train.mat", test_split="test.mat", step=1)
  config.data.update(axes="periodic", inputs_name="before", outputs_name="after")
  config.h1 = 0.0
  return config


def test_a_linear_operator_of_two_channels_is_learned(torus, tmp_path):
  """The last row of metrics, the answers to a file and the pictures are those of the same run."""
  torus.update(num_epochs=60, eval_epochs=60.0, checkpoint_epochs=60.0, normalise="global")
  torus.mesh.data, torus.schedule.name = 1, "cosine"
  loop.train(torus, str(tmp_path / "run"))
  row = metrics_file.read(tmp_path / "run")[-1]
  a, u = velocities(1, 21, 8)
  np.savez(tmp_path / "mine.npz", before=a)
  run = mixer_jax.load_run(str(tmp_path / "run"))
  found = np.float64([x["output"] for x in run.answer([str(tmp_path / "mine.npz")])])
  norm = lambda x: np.sqrt(np.square(np.float64(x)).reshape(21, -1).sum(1))
  relative = norm(found - u) / norm(u)
  assert row["test/relative_l2"] == pytest.approx(relative.mean(), rel=1e-4)
  assert row["test/worst"] == pytest.approx(relative.max(), rel=1e-4)
  for i in range(2):
    own = norm((found - u)[..., i]) / norm(u[..., i])
    assert row[f"test/relative_l2_{i}"] == pytest.approx(own.mean(), rel=1e-4)
  assert row["test/relative_l2"] < 0.1
  restored = restore.restore(str(tmp_path / "run"))
  drawn = restored.run.task.pictures(restored.variables, restored.run.datasets["test"])
  assert set(drawn) == {"functions_0", "functions_1", "errors"}
  np.savez(tmp_path / "one.npz", before=a[..., 0])
  with pytest.raises(UserError, match=r"one.npz: has \[21, 8, 8\]; .* with 2 channels"):
    next(iter(run.answer([str(tmp_path / "one.npz")])))


def test_a_channel_that_is_0_everywhere_has_no_error_of_its_own(torus):
  run = experiment.build(torus)
  variables = jax.jit(run.task.init)(jax.random.key(0))
  batch = {name: jnp.asarray(x[:4]) for name, x in run.datasets["test"].arrays().items()}
  batch["outputs"] = batch["outputs"].at[..., 1].set(0.0)
  found = run.task.evaluate(variables, batch, jnp.ones(4, bool))
  assert float(found["relative_l2_1"].value()) == 0.0
  assert 0 < float(found["relative_l2_0"].value()) < float(found["relative_l2"].value()) * 1.01


@pytest.mark.parametrize("form", ["norm", "square"])
def test_kfac_sees_the_gradient_of_the_loss_of_all_channels(torus, form):
  """Of a normal likelihood: sums of squares over the channels, as a mean over points."""
  torus.loss = form
  run = experiment.build(torus)
  variables = jax.jit(run.task.init)(jax.random.key(0))
  batch = {name: jnp.asarray(x[:8]) for name, x in run.datasets["train"].arrays().items()}

  def seen(params):
    outputs, targets, *_ = run.task.curvature_view()({"params": params}, batch)
    return jnp.mean(jnp.sum(jnp.square(outputs - jax.lax.stop_gradient(targets)), -1))

  loss = lambda params: run.task.loss({"params": params}, batch, jax.random.key(0))[0].value()
  own, others = (jax.jit(jax.grad(f))(variables["params"]) for f in (loss, seen))
  for a, b in zip(jax.tree.leaves(own), jax.tree.leaves(others)):
    np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(a).max() + 1e-7)


@pytest.mark.parametrize("kind", ["pointwise", "global"])
def test_each_channel_has_its_own_statistics(torus, kind, tmp_path):
  a, u = velocities(0, 64, 8)
  scale = np.float32([1, 1e3])
  io.savemat(tmp_path / "train.mat", {"before": 5 + scale * a, "after": u})
  torus.normalise = kind
  run = experiment.build(torus)
  seen = jax.jit(run.task.init)(jax.random.key(0))["normaliser"]["inputs"]
  axes = 0 if kind == "pointwise" else (0, 1, 2)
  given = np.float64(5 + scale * a)
  std = np.maximum(given.std(axes), 1e-3 * given.std((0, 1, 2)))  # where none varies
  for name, wanted in (("mean", given.mean(axes)), ("std", std)):
    wanted = np.broadcast_to(wanted, seen[name].shape)
    np.testing.assert_allclose(seen[name], wanted, rtol=1e-5, atol=1e-3)
  assert seen["mean"].shape == ((8, 8, 2) if kind == "pointwise" else (1, 1, 2))


def test_slopes_add_up_over_channels_and_axes(torus):
  a, u = (jnp.asarray(x[:3]) for x in velocities(0, 64, 8))
  squares = lambda x: sum(
    jnp.square(jnp.roll(x, -1, axis) - jnp.roll(x, 1, axis)).sum((1, 2, 3)) for axis in (1, 2)
  )
  found = losses.relative_h1(a, u, periodic=True, axes=2)
  np.testing.assert_allclose(found, np.sqrt(squares(a) / squares(u)), rtol=1e-3)


@pytest.mark.parametrize("name", ["fno_1d", "galerkin_1d", "mixer_operator", "galerkin_2d"])
def test_every_model_takes_channels(config, name, tmp_path):
  """From two to three; an inverse problem has means over cells of each channel."""
  grid = (33, 33) if name == "galerkin_2d" else (32,)
  rng = np.random.default_rng(0)
  a, u = (rng.normal(size=(16, *grid, c)).astype(np.float32) for c in (3, 2))
  np.savez(tmp_path / "f.npz", x=a, y=u)
  config.model = config_lib.default("operator_learning", name).model
  config.model.update(modes=2, **({"coarse": 8} if name == "galerkin_2d" else {}))
  config.data.update(dir=str(tmp_path), train_split="f.npz[:8]", test_split="f.npz[8:]")
  config.data.update(inputs_name="x", outputs_name="y", inverse=True, output_step=4, noise=0.1)
  config.update(normalise="pointwise")
  config.model.dirichlet = False
  run = experiment.build(config)
  contract.check_task(run)
  outputs = run.datasets["test"].arrays()["outputs"]
  assert outputs.shape[1:] == (*(n // 4 + n % 2 for n in grid), 3)
  assert (run.task.model.inputs, run.task.model.outputs) == (2, 3)
  if len(grid) == 1:
    near = [a[8:, i] for i in (30, 31, 0, 1, 2)]
    wanted = np.average(near, 0, weights=[0.5, 1, 1, 1, 0.5])
    np.testing.assert_allclose(outputs[:, 0], wanted, rtol=1e-4, atol=1e-6)
