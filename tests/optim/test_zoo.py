"""Every model of the zoo under K-FAC: a block per dense layer, a step that helps."""

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

from mixer_jax import models, optim

SMALL = {
  "mixer_small": dict(hidden_dim=16, num_blocks=1, tokens_mlp_dim=8, channels_mlp_dim=24),
  "gmlp_small": dict(hidden_dim=16, num_blocks=1, ffn_dim=24),
  "resmlp_s12": dict(patch_size=4, hidden_dim=16, num_blocks=1, channels_mlp_dim=24),
}
CASES = [
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
IDS = ["-".join([name, *map(str, fields.values())]) for name, fields in CASES]
# A step of the others is compiled in the slow tests.
FAST = ("resmlp_s12",)


IMAGES = jax.ShapeDtypeStruct((16, 16, 16, 3), "float32")


@pytest.mark.parametrize("name, fields", CASES, ids=IDS)
@pytest.mark.first(1)
def test_a_block_per_dense_layer(name, fields):
  model = models.build(name, 4, **SMALL[name] | fields)
  params = jax.eval_shape(model.init, jax.random.key(0), IMAGES)["params"]
  predict = lambda p, images: model.apply({"params": p}, images)
  blocks = optim.kfac_blocks(predict, params, IMAGES, norms="diagonal")
  dense = {path for path, kind in kernels(model, params, IMAGES) if kind == "dense"}
  assert dense == {b.name for b in blocks if b.kind == "kronecker"}
  named = [path for b in blocks for path in b.paths]
  paths = ["/".join(k.key for k in p) for p, _ in jax.tree_util.tree_leaves_with_path(params)]
  assert sorted(named) == sorted(paths)


STEPS = [
  pytest.param(*case, id=i, marks=() if i in FAST else pytest.mark.slow)
  for case, i in zip(CASES, IDS)
]


@pytest.mark.parametrize("name, fields", STEPS)
@pytest.mark.thorough
def test_a_step_lowers_the_loss(name, fields):
  model = models.build(name, 4, **SMALL[name] | fields)
  labels = np.arange(16) % 4
  images = np.random.default_rng(0).normal(size=IMAGES.shape) + labels[:, None, None, None]
  batch = images.astype(np.float32), labels
  params = jax.jit(model.init)(jax.random.key(0), batch[0])["params"]
  params["head"]["kernel"] = jax.random.normal(jax.random.key(1), params["head"]["kernel"].shape)
  predict = lambda p, b: (model.apply({"params": p}, b[0]), b[1])

  def loss(params):
    logits, labels = predict(params, batch)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

  tx = optim.kfac(1e-3, predict, params, batch, norms="diagonal")

  @jax.jit  # one program: the time goes into compilation
  def step(params, state):
    before, grads = jax.value_and_grad(loss)(params)
    updates, state = tx.update(grads, state, params, batch=batch, rng=jax.random.key(0))
    return before, updates, state, loss(optax.apply_updates(params, updates))

  before, updates, state, after = step(params, tx.init(params))
  assert all(np.isfinite(x).all() for x in jax.tree.leaves((updates, state)))
  assert after < before


def kernels(model, params, images):
  """Paths of layers with a kernel, and whether the layer is dense or grouped."""
  found = []

  def note(next_call, args, kwargs, context):
    module = context.module
    if context.method_name == "__call__" and isinstance(module, (nn.Dense, nn.Conv)):
      grouped = getattr(module, "feature_group_count", 1) > 1
      found.append(("/".join(module.path), "grouped" if grouped else "dense"))
    return next_call(*args, **kwargs)

  with nn.intercept_methods(note):
    jax.eval_shape(lambda p, x: model.apply({"params": p}, x), params, images)
  return found
