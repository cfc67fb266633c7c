"""Kronecker factors of the Fisher, estimated with kfac-jax: the one adapter.

For a dense layer y = W^T a the Fisher block is approximated by A (x) G, with
A the second moment of the inputs a (a 1 is appended where there is a bias) and
G that of the loss gradients with respect to the outputs y (Martens and Grosse,
2015, Section 3). Layers whose weights are shared over T tokens (all of a
Mixer's) stack the rows of all tokens; with B examples, sums over rows and
d = d loss of one example / d y:

  token_averaging  A                    G                 used by
  "published"      sum a a^T / (B T)    T/B sum d d^T     the K-FAC study's code
  "expand"         sum a a^T / (B T)    1/B sum d d^T     kfac-jax (its product),
                                                          Eschenhagen et al., 2023

The published code treats convolutions (its patch embedding) apart: there
A = sum a a^T / (B T^2), so that its product equals that of "expand".
"""

import math
import re
from typing import Any, Callable, Sequence

import jax
import jax.numpy as jnp
import kfac_jax

from mixer_jax.optim import linen
from mixer_jax.optim.curvature_blocks import Block, Diagonal, Kronecker, check_choice, path_name

Params = Batch = Any

_VARIANTS = ("dense", "repeated_dense", "patches")
_MODES = dict(sampled="fisher_gradients", exact="fisher_exact", empirical="fisher_empirical")

# From here on a symmetric product in four parts is quicker than a whole one
# (measured on CPU, 4,096 rows: 0.91 of the time at 1,024, 0.87 at 2,048, 0.83 at 3,073).
_WIDE = 1024


def _block_class(token_averaging: str, variant: str):
  """The curvature block for one kind of layer tag and one convention."""

  class TokenKroneckerFactored(kfac_jax.DenseTwoKroneckerFactored):
    """Stacks the rows of all tokens; statistics in float32 in any precision."""

    def update_curvature_matrix_estimate(
      self, state, estimation_data, ema_old, ema_new, identity_weight, batch_size
    ):
      del identity_weight
      [a] = estimation_data.primals.inputs
      [d] = estimation_data.tangents.outputs
      a, d = a.reshape(-1, a.shape[-1]), d.reshape(-1, d.shape[-1])
      tokens = d.shape[0] // batch_size
      a_scale, d_scale = 1.0 / d.shape[0], 1.0 / batch_size
      if token_averaging == "published":
        d_scale *= tokens
        a_scale /= tokens if variant == "patches" else 1
      if self.number_of_parameters == 2:
        a = jnp.concatenate([a, jnp.ones_like(a[:, :1])], axis=1)
      state = state.copy()
      state.factors[0].update(_second_moment(a) * a_scale, ema_old, ema_new)
      state.factors[1].update(_second_moment(d) * d_scale, ema_old, ema_new)
      return state

  return TokenKroneckerFactored


def _second_moment(x: jax.Array) -> jax.Array:
  """x^T x in float32; of a wide x the lower half is mirrored, not computed."""
  product = lambda a, b: jnp.einsum("na,nb->ab", a, b, preferred_element_type=jnp.float32)
  width = x.shape[1]
  if width < _WIDE:
    return product(x, x)
  left, right = x[:, : width // 2], x[:, width // 2 :]
  corner = product(left, right)
  return jnp.block([[_second_moment(left), corner], [corner.T, _second_moment(right)]])


class Curvature:
  """Which block each parameter has, and fresh estimates of their factors.

  Args:
    predict: maps (params, batch) to the outputs of the model, [batch, n]: the
      logits of a "categorical" or the means of a "normal" likelihood; or to a
      pair (outputs, targets), which the empirical Fisher needs, with int
      labels [batch] or float targets [batch, n].
    params: the parameters or their shapes.
    batch: an example batch or its shapes.
    likelihood: the predictive distribution; "normal" has variance 1/2, so that
      the negative log-likelihood is the squared error.
    estimation: "sampled" (targets drawn from the model), "exact" (expectation
      over classes) or "empirical" (the given targets).
    token_averaging: see the module's docstring.
    norms: "gradient" (plain gradient, as published) or "diagonal".
    plain: regular expressions of parameter paths: they get no block, and need none.

  Raises:
    ValueError: an unknown option, or a parameter without a block.
  """

  def __init__(
    self,
    predict: Callable[[Params, Batch], Any],
    params: Params,
    batch: Batch,
    *,
    likelihood: str = "categorical",
    estimation: str = "sampled",
    token_averaging: str = "published",
    norms: str = "gradient",
    plain: Sequence[str] = (),
  ):
    check_choice("likelihood", likelihood)
    check_choice("estimation", estimation)
    check_choice("token_averaging", token_averaging)
    check_choice("norms", norms)
    for pattern in plain:
      _check_pattern(pattern)
    self._predict, self._plain = predict, plain
    self._likelihood, self._estimation = likelihood, estimation
    block_classes = {v: _block_class(token_averaging, v) for v in _VARIANTS}
    self._estimator = kfac_jax.BlockDiagonalCurvature(
      self._registered_loss,
      default_estimation_mode=_MODES[estimation],
      layer_tag_to_block_ctor=block_classes,
      # What no layer registered becomes a generic block, refused below.
      auto_register_kwargs=dict(register_only_generic=True),
    )
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, batch))
    self._batch_size = _outputs(jax.eval_shape(predict, *shapes))[0].shape[0]
    try:
      self._estimator.finalize(shapes)
    except ValueError as e:
      if "not assigned a block" not in str(e):
        raise
      raise ValueError(
        "K-FAC cannot see layers inside nn.scan: give it the same model with its layers one by"
        " one, and wrap the optimizer with `optim.relayout`"
      ) from e
    self.blocks = self._list_blocks(shapes[0], norms, plain)

  def _registered_loss(self, params: Params, batch: Batch) -> jax.Array:
    with linen.registered_layers(self._plain) as plain:
      outputs, targets = _outputs(self._predict(params, batch))
    leaves = jax.tree_util.tree_leaves_with_path(params)
    self._declared_plain = {path_name(k) for k, x in leaves if any(x is p for p in plain)}
    outputs = outputs.astype(jnp.float32)
    if self._likelihood == "categorical":
      kfac_jax.register_softmax_cross_entropy_loss(outputs, targets)
    else:
      kfac_jax.register_squared_error_loss(outputs, targets)
    return jnp.zeros(())

  def _list_blocks(self, params: Params, norms: str, plain: Sequence[str]) -> tuple[Block, ...]:
    """One `Block` for each of the estimator's, in the estimator's order."""
    paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    leaves = jax.tree.leaves(params)
    # Order inside a block is that of registration: kernel, bias; scale, shift.
    index = self._estimator.params_vector_to_blocks_vectors(
      jax.tree.unflatten(jax.tree.structure(params), range(len(leaves)))
    )
    blocks, uncovered = [], []
    for block, members in zip(self._estimator.blocks, index):
      names = tuple(paths[i] for i in members)
      shapes = tuple(leaves[i].shape for i in members)
      sizes, tokens = (), 0
      if isinstance(block, kfac_jax.KroneckerFactored):
        kind, sizes = "kronecker", tuple(block.array_shape)
        tokens = math.prod(block.outputs_shapes[0][:-1]) // self._batch_size
      elif isinstance(block, kfac_jax.NaiveDiagonal):
        kind = "gradient"
        listed = lambda name: any(re.search(p, name) for p in plain)
        uncovered += [n for n in names if n not in self._declared_plain and not listed(n)]
      else:
        kind = norms
      name = names[0].rpartition("/")[0] or names[0]
      blocks.append(Block(name, kind, names, shapes, sizes, tokens))
    if uncovered:
      raise ValueError(
        f"no K-FAC block covers the parameters {', '.join(uncovered)}: their layers are not"
        " nn.Dense, nn.Conv or nn.LayerNorm and do not say what to make of them, or are inside"
        " nn.remat; list them in `plain` to train them with the plain gradient"
      )
    return tuple(blocks)

  def estimate(self, params: Params, batch: Batch, rng: jax.Array) -> dict[str, Any]:
    """Fresh factors of one batch (traceable); `rng` decides the sampled targets.

    Returns:
      `Kronecker` or `Diagonal` by name of the block, without the "gradient" ones.
    """
    weights = dict(ema_old=0.0, ema_new=1.0, identity_weight=0.0, batch_size=self._batch_size)
    arguments = params, batch
    state = self._estimator.update_curvature_matrix_estimate(
      self._estimator.init(rng, arguments, None, None), rng=rng, func_args=arguments, **weights
    )
    # kfac-jax normalises the empirical Fisher by batch^2; here it is a mean of
    # per-example products, as the other two estimates are.
    scale = self._batch_size if self._estimation == "empirical" else 1.0
    estimates = {}
    for block, fresh in zip(self.blocks, state.blocks_states):
      if block.kind == "kronecker":
        inputs, outputs = (factor.value for factor in fresh.factors)
        estimates[block.name] = Kronecker(inputs, outputs * scale)
      elif block.kind == "diagonal":
        values = (factor.value * scale for factor in fresh.diagonal_factors)
        estimates[block.name] = Diagonal(tuple(values))
    return estimates


def _outputs(prediction: Any) -> tuple[Any, Any]:
  return prediction if isinstance(prediction, tuple) else (prediction, None)


def _check_pattern(pattern: str) -> None:
  try:
    re.compile(pattern)
  except re.error as e:
    raise ValueError(f"plain is {pattern!r}, no regular expression: {e}") from e
