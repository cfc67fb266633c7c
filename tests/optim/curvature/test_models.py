"""K-FAC on the models of this library: a block per layer and Fourier mode, and a first step's loss.

  python -m tests.optim.curvature.test_models

makes golden_steps.json anew, for a change of a model or a step that is meant; say in the commit why.
"""

import json
import pathlib

import tests.conftest  # noqa: F401, isort: skip (run as a script, too)
from flax import traverse_util
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mixer_jax import config as config_lib
from mixer_jax import models, optim, optimizers
from mixer_jax.models import spectral

FILE = pathlib.Path(__file__).with_name("golden_steps.json")
SMALL = {
  "mixer_small": dict(hidden_dim=16, num_blocks=1, tokens_mlp_dim=8, channels_mlp_dim=24),
  "gmlp_small": dict(hidden_dim=16, num_blocks=1, ffn_dim=24),
  "resmlp_s12": dict(patch_size=4, hidden_dim=16, num_blocks=1, channels_mlp_dim=24),
}
MODELS = [
  ("mixer_small", {}),
  ("mixer_small", dict(token_mixer="galerkin", num_heads=4)),
  ("mixer_small", dict(token_mixer="fourier", num_heads=4)),
  ("resmlp_s12", {}),
  ("resmlp_s12", dict(normalization="layer_norm", pooling="class_mlp")),
  *(("resmlp_s12", dict(patch_communication=c)) for c in ("none", "mlp", "conv3x3")),
  *(("resmlp_s12", dict(patch_communication=c)) for c in ("depthwise", "separable")),
  *(("gmlp_small", dict(gating=g)) for g in ("linear", "additive", "multiplicative", "split")),
  ("gmlp_small", dict(spatial="toeplitz")),
  ("gmlp_small", dict(attention_dim=6)),
]
MODEL_IDS = ["-".join([name, *map(str, fields.values())]) for name, fields in MODELS]


IMAGES = jax.ShapeDtypeStruct((16, 16, 16, 3), "float32")


@pytest.mark.parametrize("name, fields", MODELS, ids=MODEL_IDS)
@pytest.mark.first(1)
def test_a_block_per_dense_layer(name, fields):
  model = models.build(name, 4, **SMALL[name] | fields)
  params = jax.eval_shape(model.init, jax.random.key(0), IMAGES)["params"]
  predict = lambda p, images: model.apply({"params": p}, images)
  blocks = optim.Curvature(predict, params, IMAGES, norms="diagonal").blocks
  found = {b.name: b.stacked for b in blocks if b.kind == "kronecker"}
  assert set(found) == set(kernels(model, params, IMAGES))  # grouped ones are stacks of blocks
  # A class token is no layer, and of a Toeplitz matrix diagonals are gathered.
  left = {b.name.rpartition("/")[2] for b in blocks if b.kind == "gradient"}
  assert left == {"class_mlp": {"embedding"}, "toeplitz": {"diagonals"}}.get(
    fields.get("pooling", fields.get("spatial")), set()
  )
  named = [path for b in blocks for path in b.paths]
  paths = ["/".join(k.key for k in p) for p, _ in jax.tree_util.tree_leaves_with_path(params)]
  assert sorted(named) == sorted(paths)


def kernels(model, params, images):
  """Paths of layers with a kernel."""
  found = []

  def note(next_call, args, kwargs, context):
    module = context.module
    if context.method_name == "__call__" and isinstance(module, (nn.Dense, nn.Conv)):
      found.append("/".join(module.path))
    return next_call(*args, **kwargs)

  with nn.intercept_methods(note):
    jax.eval_shape(lambda p, x: model.apply({"params": p}, x), params, images)
  return found


BLOCKS = dict(hidden_dim=4, num_blocks=1, num_heads=2, ffn_dim=3, decoder_dim=3, decoder_layers=1)
SMALL_OPERATOR = dict(BLOCKS, decoder_mlp_dim=3, modes=2)
PATCHES = dict(hidden_dim=4, num_blocks=1, decoder_dim=3, decoder_mlp_dim=3, modes=2)
PATCHES |= dict(patch_size=4, decoder_layers=1)
OPERATORS = {
  "galerkin_1d": ((6,), SMALL_OPERATOR),
  "galerkin_2d": ((6, 5), dict(SMALL_OPERATOR, coarse=3)),
  "galerkin_inverse": ((6, 5), dict(BLOCKS, coarse=3)),
  "fno_1d": ((6,), dict(hidden_dim=3, num_blocks=1, modes=2, mlp_dim=3)),
  "fno_2d": ((6, 5), dict(hidden_dim=3, num_blocks=1, modes=2, mlp_dim=3, padding=1)),
  "mixer_operator": ((6,), dict(PATCHES, tokens_mlp_dim=3, channels_mlp_dim=3)),
  "gmlp_operator": ((6,), dict(PATCHES, ffn_dim=4)),
  "resmlp_operator": ((6,), dict(PATCHES, channels_mlp_dim=3)),
}


def problem(name):
  grid, fields = OPERATORS[name]
  model = models.operator(name, grid=grid, **fields)
  rng = np.random.default_rng(0)
  values, targets = rng.normal(size=(2, 4, *grid, 1)).astype(np.float32)
  axes = np.meshgrid(*[np.linspace(0, 1, n) for n in grid], indexing="ij")
  positions = np.stack(axes, axis=-1).astype(np.float32)
  predict = lambda p, b: (model.apply({"params": p}, b[0], positions), b[1])
  init = lambda: jax.jit(model.init)(jax.random.key(0), values, positions)["params"]
  return predict, init, (values, targets)


def moved(params):
  """Heads begin at zero, which would hide the rest."""
  rng = np.random.default_rng(1)
  return jax.tree.map(lambda p: p + 0.1 * np.float32(rng.normal(size=p.shape)), params)


def losses_of_a_step(predict, params, batch, likelihood, loss):
  """The mean loss before and after a step of K-FAC, and the change that the gradient predicts."""
  params = moved(params)
  options = dict(likelihood=likelihood, norms="diagonal", estimation="exact")
  curvature = optim.Curvature(predict, params, batch, **options)
  tx = optax.chain(optim.scale_by_kfac(curvature, damping=0.1), optax.scale(-1e-3))

  @jax.jit
  def step(params, state):
    mean = lambda p: loss(*predict(p, batch)).mean()
    before, grads = jax.value_and_grad(mean)(params)
    updates, _ = tx.update(grads, state, params, batch=batch, rng=jax.random.key(0))
    return before, mean(optax.apply_updates(params, updates)), optax.tree.vdot(grads, updates)

  return [float(x) for x in step(params, tx.init(params))]


def losses_of_a_model(i):
  name, fields = MODELS[i]
  model, labels = models.build(name, 4, **SMALL[name] | fields), np.arange(16) % 4
  images = np.random.default_rng(0).normal(size=IMAGES.shape) + labels[:, None, None, None]
  batch = images.astype(np.float32), labels
  params = jax.jit(model.init)(jax.random.key(0), batch[0])["params"]
  predict = lambda p, b: (model.apply({"params": p}, b[0]), b[1])
  loss = optax.softmax_cross_entropy_with_integer_labels
  return losses_of_a_step(predict, params, batch, "categorical", loss)


def losses_of_an_operator(name):
  predict, init, batch = problem(name)
  loss = lambda y, targets: jnp.square(y - targets).sum(tuple(range(1, y.ndim)))
  return losses_of_a_step(predict, init(), batch, "normal", loss)


STEPS = {f"model {x}": (losses_of_a_model, i) for i, x in enumerate(MODEL_IDS)}
STEPS |= {f"operator {x}": (losses_of_an_operator, x) for x in OPERATORS}


@pytest.mark.parametrize("name", sorted(STEPS, key=lambda name: name != "operator fno_1d"))
@pytest.mark.first(1)  # others take seconds to compile
def test_the_loss_after_a_step_is_unchanged_and_lower_as_the_gradient_says(name):
  make, argument = STEPS[name]
  *losses, predicted = make(argument)
  before, after, change = json.loads(FILE.read_text())[name]
  np.testing.assert_allclose(losses, [before, after], rtol=2e-5)
  np.testing.assert_allclose(predicted, change, rtol=2e-3)
  assert predicted < 0
  np.testing.assert_allclose(losses[1] - losses[0], predicted, rtol=0.1)


@pytest.mark.thorough
def test_a_gradient_of_rounding_errors_is_no_sign_of_mixed_examples(caplog):
  """Keys of two numbers a head: their normalisation is their order."""
  predict, init, batch = problem("galerkin_inverse")
  curvature = optim.Curvature(predict, moved(init()), batch, likelihood="normal", norms="diagonal")
  assert "GalerkinBlock_0/attention/k" in {b.name for b in curvature.blocks}
  assert "depend on the other ones" not in caplog.text


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.first(1)
def test_every_parameter_is_in_a_block(name):
  predict, init, batch = problem(name)
  params = jax.eval_shape(init)
  blocks = optim.Curvature(predict, params, batch, likelihood="normal", norms="diagonal").blocks
  paths = traverse_util.flatten_dict(params, sep="/")
  assert sorted(path for b in blocks for path in b.paths) == sorted(paths)
  assert {b.kind for b in blocks} <= {"kronecker", "diagonal"}
  count = 8 if len(batch[0].shape) == 4 else 2
  modes = [b for b in blocks if b.name.endswith("modes")]
  assert [b.stacked for b in modes] == [(count,)] * ("inverse" not in name)
  assert all(b.kind == "kronecker" for b in modes)


@pytest.mark.parametrize("grid", [(6,), (6, 5)])
@pytest.mark.first(1)
def test_factors_of_a_mode_are_those_of_its_two_rows(grid):
  model = spectral.SpectralConv(2, 2, jax.nn.initializers.normal(1.0))
  x = np.random.default_rng(0).normal(size=(4, *grid, 3)).astype(np.float32)
  params = jax.jit(model.init)(jax.random.key(0), x)["params"]
  predict = lambda p, x: model.apply({"params": p}, x).reshape(len(x), -1)
  options = dict(likelihood="normal", estimation="exact", token_averaging="expand")
  factors = optim.Curvature(predict, params, x, **options).factors(params, x)["modes"]
  axes = tuple(range(1, x.ndim - 1))
  found = np.fft.rfftn(np.float64(x), axes=axes, norm="forward")[..., :2, :]
  if len(grid) == 2:
    found = np.concatenate([found[:, :2], found[:, -2:]], axis=1)
  found = found.reshape(4, -1, 3)
  re, im = found.real, found.imag
  rows = np.concatenate([[re, im], [-im, re]], axis=-1).reshape(8, -1, 6)
  expected = np.einsum("rki,rkj->kij", rows, rows) / 8
  np.testing.assert_allclose(factors.inputs, expected, rtol=1e-4, atol=1e-6)
  # The Fisher matrix of normal outputs of variance 1/2 is 2 I: twice the squares of a mode's two
  # waves, summed over the grid.
  size = np.zeros(len(expected))
  for k in range(len(expected)):
    for unit in (1, 1j):
      spectrum = np.zeros((*grid[:-1], grid[-1] // 2 + 1), complex)
      spectrum[(k,) if len(grid) == 1 else ([0, 1, -2, -1][k // 2], k % 2)] = unit
      size[k] += np.square(np.fft.irfftn(spectrum, grid, axes=range(len(grid)))).sum()
  size *= 2 * np.prod(grid) ** 2  # transforms are not divided on the way back
  np.testing.assert_allclose(factors.outputs, size[:, None, None] * np.eye(2), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("grid", ["fno_1d", "fno_2d"])
@pytest.mark.parametrize("optimizer", ["muon", "soap", "shampoo"])
@pytest.mark.first(1)
def test_each_mode_is_a_matrix_of_its_own(optimizer, grid):
  """A mode's updates are those that its kernel gets alone, however large the others' gradients."""
  predict, init, batch = problem(grid)
  params = init()
  options = dict(corrected=True) if optimizer == "shampoo" else {}
  config = config_lib.optimizer(optimizer, 0.1, weight_decay=0.0, **options)
  tx = optimizers.build(
    config, lambda count: 1.0, optimizers.Problem(predict, params, batch, "normal")
  )
  alone = getattr(optim, optimizer)(0.1, weight_decay=0.0, **options)
  flat = traverse_util.flatten_dict(params)
  [path] = [p for p in flat if p[-2] == "modes"]
  count = len(flat[path])
  rng = np.random.default_rng(0)
  sizes = np.logspace(0, -3, count).astype(np.float32)[:, None, None]
  state, states = tx.init(params), [alone.init({"kernel": x}) for x in flat[path]]
  for _ in range(3):
    own = sizes * rng.normal(size=flat[path].shape).astype(np.float32)
    grads = traverse_util.unflatten_dict(
      {p: np.ones_like(x) for p, x in flat.items()} | {path: own}
    )
    updates, state = tx.update(grads, state, params)
    found = traverse_util.flatten_dict(updates)[path]
    for i in range(count):
      wanted, states[i] = alone.update({"kernel": own[i]}, states[i], {"kernel": own[i]})
      np.testing.assert_allclose(found[i], wanted["kernel"], rtol=1e-3, atol=1e-5)
  assert np.all(np.sqrt(np.mean(np.square(found), axis=(1, 2))) > 1e-3)


if __name__ == "__main__":
  losses = {name: make(argument) for name, (make, argument) in STEPS.items()}
  FILE.write_text(json.dumps(losses, indent=1) + "\n")
