"""kfac-jax's own estimator on functions whose layers were found here, without its pattern matcher."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mixer_jax import optim
from mixer_jax.optim.curvature import library

pytestmark = pytest.mark.skipif(
  jax.__version_info__ >= (0, 9, 2), reason=f"kfac-jax traces no model on JAX {jax.__version__}"
)
X = np.random.default_rng(0).normal(size=(16, 6)).astype(np.float32)
BATCH = {"x": X, "y": X[:, :4].argmax(axis=1)}


def _scanned():
  """Two kernels in PyTorch's layout, and a scan over a stack."""
  draw = lambda i, *shape: 0.3 * jax.random.normal(jax.random.key(i), shape)
  params = {"in": draw(1, 8, 6), "out": draw(2, 4, 8), "w": draw(3, 2, 8, 8), "b": draw(4, 2, 8)}

  def predict(params, batch):
    x = jnp.tanh(batch["x"] @ params["in"].T)
    layer = lambda x, own: (jnp.tanh(x @ own[0] + own[1]), None)
    return jax.lax.scan(layer, x, (params["w"], params["b"]))[0] @ params["out"].T

  return predict, params


def _nnx():
  layers = nnx.Linear(6, 8, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(8, 4, rngs=nnx.Rngs(1))
  graph, state = nnx.split(nnx.Sequential(*layers))
  return lambda params, batch: nnx.merge(graph, params)(batch["x"]), state


@pytest.mark.parametrize("make", [_scanned, _nnx])
def test_factors_of_kfac_jax_are_those_of_the_curvature(make):
  kfac_jax = library.blocks().kfac_jax
  predict, params = make()
  options = dict(estimation="exact", token_averaging="expand")
  curvature = optim.Curvature(predict, params, BATCH, **options)
  tagged, enter, leave = curvature.tagged()
  matrices = enter(params)
  jax.tree.map(np.testing.assert_array_equal, leave(matrices), params)

  def loss(matrices, batch):
    logits = tagged(matrices, batch)
    kfac_jax.register_softmax_cross_entropy_loss(logits, batch["y"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

  estimator = kfac_jax.BlockDiagonalCurvature(loss, params_index=0)
  args = (matrices, BATCH)
  state = estimator.init(jax.random.key(0), args, (), (), False)
  state = estimator.update_curvature_matrix_estimate(
    state, 0.0, 1.0, 0.0, len(X), jax.random.key(1), args, "fisher_exact"
  )
  theirs = [[np.asarray(f.value) for f in own.factors] for own in state.blocks_states]
  ours, factors = [], curvature.factors(params, BATCH, jax.random.key(0))
  for block in curvature.blocks:
    flat = [np.asarray(x).reshape(-1, *x.shape[-2:]) for x in factors[block.name]]
    ours += list(zip(*flat))
  assert len(theirs) == len(ours)
  for pair in ours:
    assert any(_same_product(pair, other) for other in theirs)


def _same_product(pair, other):
  """Whether Kronecker products are equal, on whichever side a scale stands."""
  if [x.shape for x in pair] != [x.shape for x in other]:
    return False
  return np.allclose(np.kron(*pair), np.kron(*other), rtol=1e-4, atol=1e-7)
