"""A user's program, which pyright checks against the annotations of the public functions.

`assert_type` says what a call gives; it runs as well, by tests/test_extras.py.
"""

from typing import Any, assert_type

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from mixer_jax import models, optim, pretrained

Transform = optax.GradientTransformationExtraArgs


def predict(params: Any, batch: Any) -> jax.Array:
  return jnp.tanh(batch["x"] @ params["kernel"])


def loss(params: Any, batch: Any) -> jax.Array:
  return jnp.mean(predict(params, batch) ** 2)


params = {"kernel": jnp.ones((3, 2))}
batch = {"x": jnp.ones((4, 3)), "y": jnp.zeros((4, 2))}
rate = optax.cosine_decay_schedule(1e-2, 10)

curvature = assert_type(
  optim.Curvature(predict, params, batch, likelihood="normal"), optim.Curvature
)
assert_type(curvature.factors(params, batch, jax.random.key(0)), dict[str, Any])
assert_type(curvature.blocks, tuple[optim.Block, ...])
matrices = assert_type(optim.matrix_axes(predict, params, batch), optim.Matrices)

assert_type(optim.sgd(rate), Transform)
assert_type(optim.adamw(1e-3, weight_decay=0.1), Transform)
assert_type(optim.muon(1e-3, matrices=matrices), Transform)
assert_type(optim.lamb(rate, matrices=matrices), Transform)
assert_type(optim.soap(rate, matrices=matrices), Transform)
assert_type(optim.shampoo(rate), Transform)
assert_type(optim.kfac(rate, curvature), Transform)
assert_type(optim.ekfac(1e-2, curvature, damping=rate), Transform)
assert_type(optim.kfac_adam(1e-2, curvature), Transform)
assert_type(optim.kfac_muon(1e-2, curvature), Transform)
assert_type(optim.gauss_newton(curvature, learning_rate=rate), Transform)
assert_type(optim.hessian_free(curvature, learning_rate=rate), Transform)
assert_type(optim.lbfgs(1.0), Transform)
assert_type(optim.ssbroyden(1.0), Transform)
assert_type(optim.graft(optim.sgd(0.1), optim.kfac(1.0, curvature)), Transform)
assert_type(optim.in_turn([optim.adam(1e-3), optim.lbfgs()], [100]), Transform)
scaled = assert_type(optim.scale_by_kfac(curvature, damping=1e-3), Transform)
assert_type(optim.levenberg_marquardt(scaled, curvature), Transform)
assert_type(optim.constrain_norm(scaled, curvature, 1e-3, 1e-2), Transform)

model = assert_type(models.build("mixer_s16", num_classes=10, hidden_dim=8), nn.Module)
assert_type(models.image_size("mixer_s16"), int)


def weights(file: str) -> Any:
  model, params, normalization = pretrained.load(file, "mixer_s16", num_classes=10)
  assert_type(normalization, pretrained.Normalization | None)
  assert_type(pretrained.read(file), pretrained.Weights)
  pretrained.save("weights.npz", params, model)
  return params
