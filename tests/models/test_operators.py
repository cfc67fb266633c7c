"""Models of operators: the published counts and outputs, other grids, mistakes."""

import math
import pathlib

from flax import linen as nn
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixer_jax import models, options
from mixer_jax.models import galerkin, interpolate

FIXTURE = pathlib.Path(__file__).parents[1] / "fixtures" / "published_operators.npz"
BLOCKS = dict(hidden_dim=6, num_blocks=2, num_heads=2, ffn_dim=5)
SMALL = dict(BLOCKS, decoder_dim=4, decoder_mlp_dim=3)
PATCHES = dict(hidden_dim=6, num_blocks=1, patch_size=4, decoder_dim=4, decoder_mlp_dim=3, modes=3)
# Grid and fields by name: models that compile fast.
CASES = {
  "galerkin_1d": ((13,), dict(SMALL, modes=4)),
  "galerkin_2d": ((12, 12), dict(SMALL, modes=3, coarse=5)),
  "galerkin_inverse": ((12, 12), dict(BLOCKS, decoder_dim=6, coarse=5)),
  "fno_1d": ((12,), dict(hidden_dim=6, modes=4)),
  "fno_2d": ((13, 13), dict(hidden_dim=4, modes=3, padding=2)),
  "mixer_operator": ((10,), dict(PATCHES, tokens_mlp_dim=4, channels_mlp_dim=5)),
  "gmlp_operator": ((6, 10), dict(PATCHES, ffn_dim=6)),
  "resmlp_operator": ((10,), dict(PATCHES, channels_mlp_dim=5)),
}


def build(name, grid=None, **overrides):
  own, fields = CASES[name]
  return models.operator(name, grid=grid or own, **fields | overrides)


def places(grid):
  axes = np.meshgrid(*[np.linspace(0, 1, n) for n in grid], indexing="ij")
  return np.stack(axes, axis=-1).astype(np.float32)


def drawn(model, grid, batch=2):
  """Parameters by path, values and positions, all from one seed in this order."""
  rng, positions = np.random.default_rng(0), places(grid)
  values = rng.normal(size=(batch, *grid, 1)).astype(np.float32)
  tree = jax.eval_shape(model.init, jax.random.key(0), values, positions)["params"]
  params = {}
  for path, x in sorted(traverse_util.flatten_dict(tree, sep="/").items()):
    fan = 25 if x.ndim == 1 or "norm" in path else x.shape[1] if "modes" in path else 0
    fan = fan or math.prod(x.shape[:-1])
    params[path] = (rng.normal(size=x.shape) * fan**-0.5 + path.endswith("scale")).astype("f4")
  return {"params": traverse_util.unflatten_dict(params, sep="/")}, values, positions


def count(name, grid, **fields):
  # Equal blocks have one program.
  scan = {"scan_blocks": True} if "galerkin" in name else {}
  model = models.operator(name, grid=grid, **fields | scan)
  arrays = jnp.zeros((1, *grid, 1)), jnp.zeros((*grid, len(grid)))
  tree = jax.eval_shape(model.init, jax.random.key(0), *arrays)
  return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


# Of the published code, counted in PyTorch: scaomath/galerkin-transformer with its config.yml, all
# four kinds of attention alike, and zongyi-li/fourier_neural_operator at fd7b0de, real numbers.
COUNTS = {
  ("galerkin_1d", (512,)): 530_305,
  ("galerkin_2d", (141, 141)): 2_220_829,
  ("galerkin_inverse", (141, 141)): 2_383_873,
  ("fno_1d", (512,)): 549_569,
  ("fno_2d", (85, 85)): 2_368_001,
}


@pytest.mark.parametrize("name, grid", COUNTS)
@pytest.mark.first(2)
def test_published_numbers_of_parameters(name, grid):
  assert count(name, grid) == COUNTS[name, grid]


@pytest.mark.parametrize("kind", ["fourier", "softmax", "linear"])
def test_kinds_of_attention_have_the_same_number(kind):
  assert count("galerkin_1d", (512,), attention=kind) == COUNTS["galerkin_1d", (512,)]


def along(y, grid):
  """Linear interpolation of [batch, rows, columns, 1] by NumPy, axis by axis."""
  for axis, n in enumerate(grid, 1):
    old, new = np.linspace(0, 1, y.shape[axis]), np.linspace(0, 1, n)
    y = np.apply_along_axis(lambda line: np.interp(new, old, line), axis, y)
  return y


# Outputs of that code in float32, by the parameters of `drawn`, our grids halfway, and no dropout of
# attention weights, which it has in evaluation as well (tests/make_operator_fixtures.py).
@pytest.mark.parametrize("case", np.load(FIXTURE))
@pytest.mark.first(2)
def test_equals_the_published_code(case):
  name, _, kind = case.partition(" ")
  grid, expected = CASES[name][0], np.load(FIXTURE)[case]
  drops = {} if "fno" in name else dict(dropout_rate=0.5, decoder_dropout=0.5)  # not in evaluation
  model = build(name, **drops | ({"attention": kind} if kind else {}))
  y = jax.jit(model.apply)(*drawn(model, grid))
  assert y.dtype == jnp.float32 and y.shape == (2, *grid, 1)
  if name == "galerkin_inverse":
    assert expected.shape == (2, 5, 5, 1)
    expected = along(expected, grid)
  np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


def test_interpolation_keeps_the_ends_and_equals_numpy():
  x = np.random.default_rng(0).normal(size=(2, 7, 4, 3)).astype(np.float32)
  for grid in ((7, 4), (5, 9), (1, 2), (14, 4)):
    np.testing.assert_allclose(interpolate.resize(x, grid), along(x, grid), rtol=1e-5, atol=1e-6)


def test_published_grids_between():
  # `get_scaler_sizes` and the rounding of PyTorch's interpolation by a factor.
  assert interpolate.between((141,), 43) == (78,)
  assert interpolate.between((85, 85), 29) == (50, 50)
  assert interpolate.between((141,), 36) == (71,)


@pytest.mark.parametrize("name", ["galerkin_1d", "resmlp_operator", "fno_2d"])
@pytest.mark.thorough
def test_examples_do_not_matter_to_each_other(name):
  model = build(name)
  params, values, positions = drawn(model, CASES[name][0])
  apply = jax.jit(model.apply)
  alone, together = apply(params, values[1:], positions), apply(params, values, positions)
  np.testing.assert_allclose(alone[0], together[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("field", ["dropout_rate", "decoder_dropout", "stochastic_depth"])
@pytest.mark.thorough
def test_drops_in_training(field):
  models_ = [build("galerkin_1d", num_blocks=1, **{field: rate}) for rate in (0.0, 0.5)]
  params, values, positions = drawn(models_[0], (13,))
  apply = lambda model, key: model.apply(
    params, values, positions, train=True, rngs={"dropout": jax.random.key(key)}
  )
  ys = jax.jit(lambda: [apply(models_[0], 0), apply(models_[1], 0), apply(models_[1], 1)])()
  assert all(np.isfinite(y).all() for y in ys)
  assert np.abs(ys[1] - ys[0]).max() > 1e-3 and np.abs(ys[2] - ys[1]).max() > 1e-3


def test_dropout_acts_behind_the_relu_of_a_block():
  block = galerkin.GalerkinBlock(40, 1, "galerkin", dropout_rate=0.25)
  x, positions = np.random.default_rng(0).normal(size=(2, 9, 6)).astype("f4"), places((9,))[None]
  variables, seen = block.init(jax.random.key(0), x, positions), {}

  def record(call, args, kwargs, context):
    seen[context.module.name] = args[0], call(*args, **kwargs)
    return seen[context.module.name][1]

  with nn.intercept_methods(record):
    block.apply(variables, x, positions, train=True, rngs={"dropout": jax.random.key(1)})
  hidden, read = np.maximum(seen["Dense_0"][1], 0), np.asarray(seen["Dense_1"][0])
  kept = read[hidden > 0] != 0
  assert 0.65 < kept.mean() < 0.85
  np.testing.assert_allclose(read[hidden > 0][kept], hidden[hidden > 0][kept] / 0.75, rtol=1e-6)


def smooth(grid):
  x = places(grid)
  return np.sin(3 * x.sum(-1) + 0.4)[None, ..., None].astype(np.float32)


@pytest.mark.parametrize("name, fine", [("galerkin_1d", 193), ("galerkin_2d", 67), ("fno_1d", 193)])
@pytest.mark.first(1)
def test_a_finer_grid_gives_the_same_function(name, fine):
  coarse = (fine + 2) // 3
  rank = len(CASES[name][0])
  fields = {"coarse": 8} if rank == 2 else {}
  model = build(name, (coarse,) * rank, num_blocks=1, **fields)
  params, _, _ = drawn(model, (coarse,) * rank)
  apply = jax.jit(model.apply)
  ys = [apply(params, smooth(g), places(g)) for g in ((coarse,) * rank, (fine,) * rank)]
  thinned = ys[1][(slice(None), *[slice(None, None, 3)] * rank)]
  assert thinned.shape == ys[0].shape
  assert np.abs(thinned - ys[0]).max() < 0.1 * np.abs(ys[0]).max()


def test_outputs_at_the_boundary_are_zero():
  grid = CASES["galerkin_2d"][0]
  free, bound = (build("galerkin_2d", dirichlet=d, num_blocks=0) for d in (False, True))
  arguments = drawn(free, grid)
  y, zero = jax.jit(lambda *a: (free.apply(*a), bound.apply(*a)))(*arguments)
  np.testing.assert_allclose(zero[:, 1:-1, 1:-1], y[:, 1:-1, 1:-1], rtol=1e-5, atol=1e-6)
  assert np.abs(zero).sum() > 0
  for edge in (zero[:, 0], zero[:, -1], zero[:, :, 0], zero[:, :, -1]):
    assert not np.any(edge)


@pytest.mark.parametrize("name", ["galerkin_2d", "mixer_operator"])
@pytest.mark.thorough
def test_scanned_and_rematerialised_blocks_and_bfloat16(name):
  grid = CASES[name][0]
  model = build(name, num_blocks=2)
  params, values, positions = drawn(model, grid)
  scanned = build(name, num_blocks=2, scan_blocks=True, remat=True)
  low = build(name, num_blocks=2, dtype="bfloat16")

  @jax.jit
  def outputs(params, *arrays):
    stacked = {"params": models.stacked(params["params"])}
    every = model.apply(params, *arrays), scanned.apply(stacked, *arrays)
    return *every, low.apply(params, *arrays)

  expected, y, rounded = outputs(params, values, positions)
  np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
  assert rounded.dtype == jnp.float32
  assert 0 < np.abs(rounded - expected).max() < 0.1 * np.abs(expected).max()
  tree = jax.eval_shape(low.init, jax.random.key(0), values, positions)
  assert {x.dtype for x in jax.tree.leaves(tree)} == {jnp.dtype("float32")}


def start(name, grid, **fields):
  model = models.operator(name, grid=grid, **fields)
  arrays = jnp.zeros((1, *grid, 1)), jnp.zeros((*grid, len(grid)))
  params = jax.jit(model.init)(jax.random.key(0), *arrays)["params"]
  return traverse_util.flatten_dict(params, sep="/")


@pytest.mark.thorough
def test_starts_as_published():
  """Standard deviations of PyTorch's Xavier law over [in, out, modes, (modes,) 2]; limits."""
  one = start("galerkin_1d", (16,), num_blocks=0, modes=8)
  conv = "SpectralBlock_0/conv/modes/kernel"
  np.testing.assert_allclose(one[conv].std(), (144 * 8) ** -0.5 / (96 * 48), rtol=0.02)
  two = start("galerkin_2d", (12, 12), num_blocks=0, modes=6, coarse=4)
  np.testing.assert_allclose(two[conv].std(), 1 / (32 * 32 * 6), rtol=0.02)
  fno = start("fno_1d", (12,), num_blocks=1, modes=4)
  np.testing.assert_allclose(fno[conv].max(), 1 / 64**2, rtol=1e-3)
  np.testing.assert_allclose(fno[conv].mean(), 0.5 / 64**2, rtol=0.02)
  assert fno[conv].min() >= 0
  for path, inputs in {"decoder_in": 130, "stem/conv1/conv": 9 * 128, "decoder_out": 32}.items():
    for leaf in ("kernel", "bias") if "conv" not in path else ("kernel",):
      assert 0.85 < np.abs(two[f"{path}/{leaf}"]).max() * inputs**0.5 <= 1


@pytest.mark.parametrize("name", models.OPERATORS)
def test_every_field_is_an_option(name):
  cls = models.OPERATORS[name].func
  fields = set(cls.__dataclass_fields__) - {"grid", "inputs", "outputs", "axes", "parent", "name"}
  assert set(options.of(cls)) == fields


def all_mlp(grid):
  fields = dict(
    hidden_dim=6, num_blocks=0, ffn_dim=6, patch_size=4, decoder="pointwise", decoder_dim=4
  )
  return models.operator("gmlp_operator", grid=grid, **fields)


def test_an_all_mlp_puts_each_patch_back_in_its_place():
  """Without blocks an output depends on its own patch alone."""
  model, grid = all_mlp((8, 12)), (8, 12)
  positions = jnp.zeros((*grid, 2))
  x = np.random.default_rng(0).normal(size=(1, *grid, 1)).astype(np.float32)
  params = jax.jit(model.init)(jax.random.key(0), x, positions)
  moved = x.copy()
  moved[0, 1, 6] += 3
  apply = jax.jit(model.apply)
  changed = np.abs(apply(params, moved, positions) - apply(params, x, positions))[0, ..., 0] > 1e-7
  patch = np.zeros(grid, bool)
  patch[0:4, 4:8] = True
  np.testing.assert_array_equal(changed, patch)


def test_the_last_points_are_repeated_to_fill_the_last_patch():
  short, whole = all_mlp((10,)), all_mlp((12,))
  x = np.random.default_rng(0).normal(size=(1, 10, 1)).astype(np.float32)
  positions = np.linspace(0, 1, 10, dtype=np.float32)[:, None]
  params = jax.jit(short.init)(jax.random.key(0), x, positions)
  longer = lambda a, axis: np.concatenate([a, np.repeat(np.take(a, [-1], axis), 2, axis)], axis)
  wanted = whole.apply(params, longer(x, 1), longer(positions, 0))[:, :10]
  np.testing.assert_allclose(short.apply(params, x, positions), wanted, rtol=1e-5, atol=1e-6)
