"""What all models of images do alike: heads, types, dropout, stochastic depth, scanned blocks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks import flops
from mixer_jax import models
from tests.models.common import images_of, randomised, run, shapes_of, tree_of

SIZES = dict(patch_size=4, hidden_dim=16, num_blocks=2)
CASES = {
  "mixer": ("mixer_small", dict(tokens_mlp_dim=6, channels_mlp_dim=20)),
  "attention": ("mixer_small", dict(token_mixer="galerkin", num_heads=2, channels_mlp_dim=20)),
  "fourier": ("mixer_small", dict(token_mixer="fourier", num_heads=2, channels_mlp_dim=20)),
  "resmlp": ("resmlp_s12", dict(channels_mlp_dim=20, pooling="class_mlp")),
  "gmlp": ("gmlp_small", dict(ffn_dim=20, attention_dim=4)),
  "tmlp": ("tmlp_small", dict(ffn_dim=20)),
}
SCANNED = ("mixer", "attention", "resmlp", "gmlp")
IMAGES = images_of(3, 8, 8)


def build(case, **fields):
  name, own = CASES[case]
  return models.build(name, 5, **SIZES | own | fields)


def random_params(model):
  return randomised(model, IMAGES, mean=0.1)


def close(found, expected, tolerance=2e-5):
  """Equal up to rounding, which is measured against the largest number of an array."""

  def check(a, b):
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(np.abs(b).max(), 1e-3))

  jax.tree.map(check, found, expected)


@pytest.mark.parametrize("case", ["mixer", "gmlp"])
def test_heads_start_at_zero(case):
  logits, _ = jax.jit(build(case).init_with_output)(jax.random.key(0), IMAGES)
  np.testing.assert_array_equal(logits, 0.0)


@pytest.mark.parametrize("case", ["mixer", "resmlp", "gmlp"])
@pytest.mark.thorough
def test_a_model_without_a_head_gives_what_the_head_sees(case):
  whole = build(case)
  without = whole.clone(num_classes=0)
  params = random_params(whole)
  assert shapes_of(whole, 8).keys() - shapes_of(without, 8).keys() == {"head/kernel", "head/bias"}
  features = without.apply({"params": params}, IMAGES)
  assert (features.shape, features.dtype) == ((3, 16), jnp.float32)
  logits = np.asarray(features) @ params["head"]["kernel"] + params["head"]["bias"]
  np.testing.assert_allclose(run(whole, params, IMAGES)[0], logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.first(1)
def test_bfloat16_computes_low_and_stores_high(case):
  low, params = build(case, dtype="bfloat16"), random_params(build(case))
  logits, tokens = run(low, params, IMAGES)
  assert (tokens.dtype, logits.dtype) == (jnp.bfloat16, jnp.float32)
  assert {x.dtype for x in jax.tree.leaves(tree_of(low, IMAGES))} == {jnp.dtype("float32")}
  expected, _ = run(build(case), params, IMAGES)
  np.testing.assert_allclose(logits, expected, rtol=0.1, atol=0.05 * np.abs(expected).max())


@pytest.mark.parametrize("case", ["attention", "fourier"])
@pytest.mark.thorough
def test_attention_takes_any_size(case):
  model = build(case)
  params = random_params(model)
  for size in ((8, 8), (12, 20)):
    logits, tokens = run(model, params, images_of(2, *size))
    assert logits.shape == (2, 5) and np.isfinite(logits).all()
    assert tokens.shape == (2, size[0] * size[1] // 16, 16)


@pytest.mark.parametrize("case", ["mixer", "resmlp"])
@pytest.mark.thorough
def test_dropout_acts_in_training_only(case):
  model = build(case, dropout_rate=0.5)
  params = random_params(model)
  still = run(model, params, IMAGES)[0]
  assert not np.allclose(*(run(model, params, IMAGES, key)[0] for key in (0, 1)))
  np.testing.assert_array_equal(still, run(build(case), params, IMAGES)[0])


@pytest.mark.parametrize("fields", [{}, dict(scan_blocks=True, remat=True)], ids=str)
@pytest.mark.thorough
def test_the_drop_rates_of_a_mixer_grow_with_depth_and_branches_stay_unscaled(fields):
  """A Mixer of two blocks has the rates 0 and 0.5."""
  model = build("mixer", stochastic_depth=0.5, **fields)
  apart, images = random_params(build("mixer")), images_of(64, 8, 8)
  params = models.stacked(apart) if fields else apart
  _, dropped = run(model, params, images, 0)
  first = {k: v for k, v in apart.items() if k != "MixerBlock_1"}
  _, after_first = run(build("mixer", num_blocks=1), first, images)
  same = np.isclose(dropped, after_first, rtol=1e-5, atol=1e-5).all(axis=(1, 2))
  # The first block always acts. Both branches of the second one are dropped at 1/4.
  assert 6 <= same.sum() <= 28  # binomial(64, 1/4)


@pytest.mark.thorough
def test_gmlp_drops_whole_branches_of_every_block_and_rescales():
  images, model = images_of(64, 8, 8), build("gmlp", stochastic_depth=0.5, num_blocks=1)
  params = random_params(model)
  _, kept = run(model, params, images)
  _, dropped = run(model, params, images, 0)
  _, stem = run(build("gmlp", num_blocks=0), params, images)
  is_stem, is_twice = (
    np.isclose(dropped, stem + times * (kept - stem), rtol=1e-4, atol=1e-4).all(axis=(1, 2))
    for times in (0, 2)
  )
  assert (is_stem ^ is_twice).all()
  assert 18 <= is_stem.sum() <= 46  # binomial(64, 1/2)


@functools.partial(jax.jit, static_argnums=0)
def outputs_and_gradient(model, params, train_key=None):
  """Logits, tokens and the gradient of a function of the logits."""
  options = dict(train=True, rngs={"dropout": train_key}) if train_key is not None else {}

  def loss(params):
    logits, state = model.apply({"params": params}, IMAGES, mutable="intermediates", **options)
    return jnp.mean(jnp.sin(logits)), (logits, state["intermediates"]["tokens"][0])

  gradient, outputs = jax.grad(loss, has_aux=True)(params)
  return outputs, gradient


@pytest.mark.parametrize("case", SCANNED)
@pytest.mark.thorough
def test_a_scan_computes_what_blocks_one_by_one_do(case):
  params = random_params(build(case))
  outputs, gradient = outputs_and_gradient(build(case), params)
  for remat in (False, True) if case == "mixer" else (True,):
    model = build(case, scan_blocks=True, remat=remat)
    own, own_gradient = outputs_and_gradient(model, models.stacked(params))
    close(own, outputs)
    close(models.unrolled(own_gradient), gradient)


@pytest.mark.thorough
def test_rematerialised_blocks_drop_the_same_units_twice():
  """Without a scan rematerialisation keeps the random numbers."""
  drops = dict(stochastic_depth=0.5, dropout_rate=0.5)
  params, key = random_params(build("mixer")), jax.random.key(2)
  plain = outputs_and_gradient(build("mixer", **drops), params, key)
  close(outputs_and_gradient(build("mixer", remat=True, **drops), params, key), plain)
  still, _ = outputs_and_gradient(build("mixer"), params)
  assert np.abs(plain[0][0] - still[0]).max() > 0.01  # something was dropped


@pytest.mark.parametrize("case", ["mixer", "gmlp"])
@pytest.mark.thorough
def test_scanned_blocks_start_as_the_others_do(case):
  """The spread of each kernel is that of one block, and no two blocks are equal."""
  wide = dict(hidden_dim=64, scan_blocks=False)
  wide |= dict(ffn_dim=128) if case == "gmlp" else dict(channels_mlp_dim=128)
  apart, scanned = (
    build(case, **wide | dict(scan_blocks=scan)).init(jax.random.key(3), IMAGES)
    for scan in (False, True)
  )
  apart, scanned = apart["params"], models.unrolled(scanned["params"])
  shape = functools.partial(jax.tree.map, lambda x: (x.shape, x.dtype))
  assert shape(scanned) == shape(apart)
  for path, x in jax.tree_util.tree_leaves_with_path(scanned):
    expected = functools.reduce(lambda tree, key: tree[key.key], path, apart)
    if x.size >= 2000 and np.std(expected):
      np.testing.assert_allclose(np.std(x), np.std(expected), rtol=0.1, err_msg=str(path))
      assert abs(np.mean(x) - np.mean(expected)) < 0.1 * np.std(x), path
  own = {
    k: max(jax.tree.leaves(v), key=np.size).ravel() for k, v in scanned.items() if "Block_" in k
  }
  first, second = (next(v for k, v in own.items() if k.endswith(f"Block_{i}")) for i in (0, 1))
  assert abs(np.corrcoef(first, second)[0, 1]) < 0.1


def test_layouts_by_hand():
  stack = np.arange(24.0).reshape(12, 2)
  params = {
    "GmlpBlocks": {"Dense_0": {"kernel": stack}},
    "ClassMlpBlock_0": {"scale": np.ones(2)},
    "head": {"bias": np.zeros(3)},
  }
  apart = models.unrolled(params)
  assert len(apart) == 14 and apart["head"] is params["head"]
  for i in range(12):
    assert apart[f"GmlpBlock_{i}"]["Dense_0"]["kernel"].tolist() == [2 * i, 2 * i + 1]
  again = models.stacked(apart)
  assert again.keys() == params.keys()
  jax.tree.map(np.testing.assert_array_equal, again, params)
  assert isinstance(again["GmlpBlocks"]["Dense_0"]["kernel"], np.ndarray)
  with pytest.raises(KeyError, match="GmlpBlock_3"):
    models.stacked({k: v for k, v in apart.items() if k != "GmlpBlock_3"})


@pytest.mark.thorough
def test_layouts_of_an_optimizer_s_state():
  params = random_params(build("mixer"))
  tx = optax.chain(optax.trace(0.9), optax.adam(1e-3))
  step = jax.jit(lambda params: tx.update(params, tx.init(params), params)[1])
  apart, expected = step(params), step(models.stacked(params))
  found = models.stacked(apart)
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  jax.tree.map(np.testing.assert_array_equal, found, expected)
  jax.tree.map(np.testing.assert_array_equal, models.unrolled(found), apart)


def test_without_blocks_there_is_nothing_to_scan():
  params = random_params(build("mixer", num_blocks=0, scan_blocks=True))
  assert params.keys() == {"stem", "pre_head_layer_norm", "head"}


def gradient_program(num_blocks=6, **fields):
  """Lowered."""
  model = models.build("mixer_small", 10, hidden_dim=32, num_blocks=num_blocks, **fields)
  batch = jnp.zeros((32, 32, 32, 3))
  shapes = jax.eval_shape(model.init, jax.random.key(0), batch)["params"]
  loss = lambda params: jnp.mean(model.apply({"params": params}, batch, train=True) ** 2)
  return jax.jit(jax.grad(loss)).lower(shapes)


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.thorough
def test_a_scanned_program_does_not_grow_with_depth(remat):
  length = lambda **fields: gradient_program(remat=remat, **fields).as_text().count("\n")
  assert length(scan_blocks=True, num_blocks=24) == length(scan_blocks=True, num_blocks=3)
  assert length(num_blocks=3) > 1.7 * length(num_blocks=1)


@pytest.mark.parametrize("fields", [dict(remat=True), dict(scan_blocks=True)], ids=str)
@pytest.mark.first(1)
def test_multiply_adds_are_counted_in_every_form(fields):
  # 4 tokens of 4x4x3 pixels, 16 channels, 2 blocks of 6 and 20 hidden units, 5 classes.
  block = 16 * 2 * 4 * 6 + 4 * 2 * 16 * 20
  model = build("mixer", **fields)
  shapes = jax.eval_shape(model.init, jax.random.key(0), IMAGES)
  found = flops.multiply_adds(model.apply, shapes, images_of(1, 8, 8))
  assert found == 4 * 48 * 16 + 2 * block + 16 * 5


@pytest.mark.thorough
def test_rematerialisation_saves_memory():
  """Of 6 blocks' insides one is alive at a time.

  On CPUs XLA computes the second forward pass early: there only a loop saves memory.
  """
  plain, scanned, saving = (
    gradient_program(remat=remat, scan_blocks=scan).compile().memory_analysis().temp_size_in_bytes
    for remat, scan in ((False, False), (False, True), (True, True))
  )
  assert saving < 0.4 * min(plain, scanned)


@pytest.mark.thorough
def test_rematerialisation_adds_less_than_a_forward_pass():
  """Forward and backward take 3 units; of the second forward pass the last products go unused."""
  plain, saving = (
    gradient_program(3, remat=remat).cost_analysis()["flops"] for remat in (False, True)
  )
  assert 1.1 < saving / plain < 4 / 3
