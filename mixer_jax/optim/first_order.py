"""First-order optimizers as chains that end in a learning rate.

Let g be the gradient of the parameters w, and l the weight decay. An optimizer with L2 regularisation
hands g + l w to its rule. One with decoupled decay hands it g and adds l w to the update.

All take

  learning_rate   a number, or a schedule of the update count;
  weight_decay    l, a number or a schedule;
  decay_mask      as in `optax.add_decayed_weights`: a function of the parameters, or a tree of
                  bools like them; None decays all.

States are float32 where parameters have 16 bits: squares of their gradients would be rounded away.
"""

from __future__ import annotations  # `help` shows names, not what they stand for

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from mixer_jax.optim import polar, trees
from mixer_jax.optim.matrices import Matrices

Transform = optax.GradientTransformation
NOT_BY_MUON = r"(^|/)(head|embedding)(/|$)"  # they take Adam, as is usual


def _keeping_types(inner: Transform) -> Transform:
  """A transform whose updates keep their types: numbers of a schedule are float32."""

  def update_fn(updates, state, params=None):
    found, state = inner.update(updates, state, params)
    return jax.tree.map(lambda u, x: x.astype(u.dtype), updates, found), state

  return optax.GradientTransformation(inner.init, update_fn)


def add_decayed_weights(weight_decay: Any, decay_mask: Any) -> Transform:
  """`optax.add_decayed_weights`, whose updates keep their types."""
  return _keeping_types(optax.add_decayed_weights(weight_decay, decay_mask))


def checked_rate(learning_rate: Any) -> Any:
  """The rate. Raises a ValueError if it has 16 bits: decays beside it then have, too, and 0.999 is 1."""
  dtype = getattr(learning_rate, "dtype", None)
  if dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 2:
    raise ValueError(
      f"learning_rate is {dtype}, in which decays are rounded to 1; allowed: float32, which"
      " optax.inject_hyperparams(..., hyperparam_dtype=jnp.float32) makes it"
    )
  return learning_rate


def scale_by_rate(learning_rate: Any) -> Transform:
  """`optax.scale_by_learning_rate` of a `checked_rate`, whose updates keep their types."""
  return _keeping_types(optax.scale_by_learning_rate(checked_rate(learning_rate)))


def in_float32(rule: Transform) -> optax.GradientTransformationExtraArgs:
  """A rule that computes in float32, and keeps its state there, for gradients of 16 bits.

  Its updates have the gradients' types.
  """
  rule = optax.with_extra_args_support(rule)
  wide = lambda tree: jax.tree.map(trees.wide, tree)

  def update_fn(updates, state, params=None, **extra):
    own = None if params is None else wide(params)
    found, new = rule.update(wide(updates), state, own, **extra)
    return trees.typed_as((updates, state), (found, new))

  return optax.GradientTransformationExtraArgs(lambda params: rule.init(wide(params)), update_fn)


def with_l2(
  rule: Transform, learning_rate: Any, weight_decay: Any, decay_mask: Any
) -> optax.GradientTransformationExtraArgs:
  """A rule for gradients with L2 regularisation."""
  decay = add_decayed_weights(weight_decay, decay_mask)
  return optax.chain(decay, in_float32(rule), scale_by_rate(learning_rate))


def with_decoupled_decay(
  rule: Transform, learning_rate: Any, weight_decay: Any, decay_mask: Any
) -> optax.GradientTransformationExtraArgs:
  """A rule of gradients alone with decoupled decay, as in AdamW."""
  return decoupled(in_float32(rule), learning_rate, weight_decay, decay_mask)


def decoupled(
  rule: Transform, learning_rate: Any, weight_decay: Any, decay_mask: Any
) -> optax.GradientTransformationExtraArgs:
  """A rule that takes gradients and parameters of any type, with decoupled decay and a rate."""
  decay = add_decayed_weights(weight_decay, decay_mask)
  return optax.chain(rule, decay, scale_by_rate(learning_rate))


def sgd(
  learning_rate: optax.ScalarOrSchedule,
  *,
  momentum: float = 0.9,
  nesterov: bool = False,
  weight_decay: optax.ScalarOrSchedule = 0.0,
  decay_mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
  """SGD with momentum and L2 regularisation: `m <- momentum m + g`, an update of `-rate m`.

  This is PyTorch's form; with `nesterov` the update is `-rate (momentum m + g)`.

  Args:
    learning_rate: a number, or a schedule of the update count.
    momentum: decay of the momentum m.
    nesterov: whether the momentum is Nesterov's.
    weight_decay: a number or a schedule; this times the parameters is added to the gradient.
    decay_mask: as in `optax.add_decayed_weights`; None decays all parameters.

  Returns:
    A transform; its update needs parameters.

  Raises:
    ValueError: the learning rate is an array of 16 bits.

  Example:
    ```python
    import jax.numpy as jnp
    from mixer_jax import optim

    params, grads = {"w": jnp.ones(3)}, {"w": jnp.full(3, 0.1)}
    tx = optim.sgd(0.1, momentum=0.9)
    updates, state = tx.update(grads, tx.init(params), params)
    ```
  """
  return with_l2(optax.trace(momentum, nesterov), learning_rate, weight_decay, decay_mask)


def adam(
  learning_rate: optax.ScalarOrSchedule,
  *,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
  weight_decay: optax.ScalarOrSchedule = 0.0,
  decay_mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
  """Adam with L2 regularisation.

  Kingma and Ba, 2015, https://arxiv.org/abs/1412.6980, Algorithm 1. The K-FAC study's code calls
  this Adam; `adamw` decouples the decay.

  Args:
    learning_rate: a number, or a schedule of the update count.
    b1: decay of the first moments.
    b2: decay of the second moments.
    eps: number added to the root of the second moments.
    weight_decay: a number or a schedule; this times the parameters is added to the gradient.
    decay_mask: as in `optax.add_decayed_weights`; None decays all parameters.

  Returns:
    A transform; its update needs parameters.

  Raises:
    ValueError: the learning rate is an array of 16 bits.

  Example:
    ```python
    import jax.numpy as jnp
    from mixer_jax import optim

    params, grads = {"w": jnp.ones(3)}, {"w": jnp.full(3, 0.1)}
    tx = optim.adam(1e-3)
    updates, state = tx.update(grads, tx.init(params), params)
    ```
  """
  return with_l2(optax.scale_by_adam(b1, b2, eps), learning_rate, weight_decay, decay_mask)


def adamw(
  learning_rate: optax.ScalarOrSchedule,
  *,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
  weight_decay: optax.ScalarOrSchedule = 1e-2,
  decay_mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
  """AdamW: Adam with decoupled weight decay.

  Loshchilov and Hutter, 2019, https://arxiv.org/abs/1711.05101, Algorithm 2. As in PyTorch and
  optax, but not in the paper, the decay is multiplied by the learning rate.

  Args:
    learning_rate: a number, or a schedule of the update count.
    b1: decay of the first moments.
    b2: decay of the second moments.
    eps: number added to the root of the second moments.
    weight_decay: decoupled, a number or a schedule.
    decay_mask: as in `optax.add_decayed_weights`; None decays all parameters.

  Returns:
    A transform; its update needs parameters.

  Raises:
    ValueError: the learning rate is an array of 16 bits.

  Example:
    ```python
    import jax.numpy as jnp
    from mixer_jax import optim

    params, grads = {"w": jnp.ones(3)}, {"w": jnp.full(3, 0.1)}
    tx = optim.adamw(1e-3, weight_decay=0.05)
    updates, state = tx.update(grads, tx.init(params), params)
    ```
  """
  rule = optax.scale_by_adam(b1, b2, eps)
  return with_decoupled_decay(rule, learning_rate, weight_decay, decay_mask)


def lamb(
  learning_rate: optax.ScalarOrSchedule,
  *,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-6,
  weight_decay: optax.ScalarOrSchedule = 0.0,
  decay_mask: Any = None,
  matrices: Matrices | None = None,
) -> optax.GradientTransformationExtraArgs:
  """LAMB: Adam with decoupled decay, and a step of each array as long as the array times the rate.

  You et al., 2020, https://arxiv.org/abs/1904.00962, Algorithm 2, as in ResMLP's recipes. As in the
  code that trained ResMLP (FusedLAMB of apex), a parameter without weight decay, by its mask, makes
  Adam's step: a bias that starts at 0 would hardly grow by steps of its own length.

  Args:
    learning_rate: a number, or a schedule of the update count.
    b1: decay of the first moments.
    b2: decay of the second moments.
    eps: number added to the root of the second moments.
    weight_decay: decoupled, a number or a schedule.
    decay_mask: as in `optax.add_decayed_weights`; None decays all parameters.
    matrices: which axes count layers of a stack, each of which then has a norm of its own, see
      `matrix_axes`; None: one norm for each array.

  Returns:
    A transform; its update needs parameters.

  Raises:
    ValueError: the learning rate is an array of 16 bits; in `init`, the parameters are one vector
      without a name.

  Example:
    ```python
    import jax.numpy as jnp
    from mixer_jax import optim

    params, grads = {"w": jnp.ones(3)}, {"w": jnp.full(3, 0.1)}
    tx = optim.lamb(5e-3, weight_decay=0.2)
    updates, state = tx.update(grads, tx.init(params), params)
    ```
  """
  adapted = _scale_by_trust_ratio(matrices)
  return optax.chain(
    in_float32(optax.scale_by_adam(b1, b2, eps)),
    add_decayed_weights(weight_decay, decay_mask),
    adapted if decay_mask is None else optax.masked(adapted, decay_mask),
    scale_by_rate(learning_rate),
  )


def _scale_by_trust_ratio(matrices: Matrices | None) -> Transform:
  """`optax.scale_by_trust_ratio` with one ratio for each array, or layer of a stack."""
  each = (matrices or Matrices(axes=lambda path, shape: None)).each

  def scaled(update, param, stacked):
    axes = tuple(range(stacked, update.ndim))
    norm = lambda x: jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=axes, keepdims=True))
    ratio = norm(param) / norm(update)
    ratio = jnp.where((norm(param) == 0) | (norm(update) == 0), 1.0, ratio)
    return (update * ratio).astype(update.dtype)

  def update_fn(updates, state, params=None):
    return each(scaled, updates, params), state

  def init_fn(params):
    trees.check_arrays(params)
    return optax.EmptyState()

  return optax.GradientTransformation(init_fn, update_fn)


def adagrad(
  learning_rate: optax.ScalarOrSchedule,
  *,
  initial_accumulator: float = 0.1,
  eps: float = 1e-7,
  weight_decay: optax.ScalarOrSchedule = 0.0,
  decay_mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
  """Adagrad (Duchi et al., 2011, https://jmlr.org/papers/v12/duchi11a.html) with L2 regularisation.

  Args:
    learning_rate: a number, or a schedule of the update count.
    initial_accumulator: sum of squares to start from.
    eps: number added to the sum of squares, under the root.
    weight_decay: a number or a schedule; this times the parameters is added to the gradient.
    decay_mask: as in `optax.add_decayed_weights`; None decays all parameters.

  Returns:
    A transform; its update needs parameters.

  Raises:
    ValueError: the learning rate is an array of 16 bits.

  Example:
    ```python
    import jax.numpy as jnp
    from mixer_jax import optim

    params, grads = {"w": jnp.ones(3)}, {"w": jnp.full(3, 0.1)}
    tx = optim.adagrad(0.1)
    updates, state = tx.update(grads, tx.init(params), params)
    ```
  """
  return with_l2(
    optax.scale_by_rss(initial_accumulator, eps), learning_rate, weight_decay, decay_mask
  )


def takes_adam(name: str, adam_paths: str) -> bool:
  """Whether `adam_paths`, a regular expression, matches a parameter; "" matches none."""
  return bool(adam_paths and re.search(adam_paths, name))


def muon(
  learning_rate: optax.ScalarOrSchedule,
  *,
  momentum: float = 0.95,
  nesterov: bool = True,
  rms: float = 0.2,
  normuon: bool = False,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
  adam_paths: str = NOT_BY_MUON,
  matrices: Matrices | None = None,
  weight_decay: optax.ScalarOrSchedule = 1e-2,
  decay_mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
  """Muon (Jordan, 2024) for matrices, Adam for the rest, one rate for both, as optax has it.

  An update of a matrix has the root mean square `rms`, as one of Adam has about (Liu et al., 2025,
  https://arxiv.org/abs/2502.16982, Section 2.2). The head and embeddings take Adam, as is usual.

  Args:
    learning_rate: a number, or a schedule of the update count.
    momentum: decay of the momentum.
    nesterov: whether the momentum is Nesterov's; Adam then is NAdam.
    rms: root mean square of an update of a matrix, at a rate of 1.
    normuon: whether this is NorMuon (Li et al., 2025, https://arxiv.org/abs/2510.05491): each
      neuron's part of an update is divided by its running root mean square, of decay 0.95.
    b1: decay of Adam's first moments.
    b2: decay of Adam's second moments.
    eps: number added to the root of Adam's second moments.
    adam_paths: a regular expression of the paths of matrices that take Adam; "" matches none.
      Tables that ids look up take Adam, too.
    matrices: which axes are inputs, outputs and layers of stacks, see `matrix_axes`. None: arrays
      of two or more axes named kernel or weight are matrices, see `Matrices`.
    weight_decay: decoupled, a number or a schedule.
    decay_mask: as in `optax.add_decayed_weights`; None decays all parameters.

  Returns:
    A transform; its update needs parameters.

  Raises:
    ValueError: the learning rate is an array of 16 bits; in `init`, no matrix is left for Muon.

  Example:
    ```python
    import jax.numpy as jnp
    from mixer_jax import optim

    params, grads = {"kernel": jnp.ones((2, 3))}, {"kernel": jnp.full((2, 3), 0.1)}
    tx = optim.muon(3e-3)
    updates, state = tx.update(grads, tx.init(params), params)
    ```
  """
  chosen = matrices or Matrices()

  def is_muon(path: str, part: Any) -> bool:
    named = matrices is not None or path.rpartition("/")[2] in ("kernel", "weight")
    return part.matrix and not part.table and named and not takes_adam(path, adam_paths)

  def numbers(tree: Any) -> Any:
    matrix = lambda x: optax.contrib.MuonDimensionNumbers((x.ndim - 2,), (x.ndim - 1,))
    return {
      "matrices": jax.tree.map(matrix, tree["matrices"]),
      "others": dict.fromkeys(tree["others"]),
    }

  inner = optax.chain(
    optax.contrib.muon(
      1.0,
      beta=momentum,
      nesterov=nesterov,
      adam_b1=b1,
      adam_b2=b2,
      eps=eps,
      muon_weight_dimension_numbers=numbers,
      consistent_rms=rms,
    ),
    optax.scale(-1.0),
  )
  if normuon:
    of_matrices = {"matrices": True, "others": False}
    inner = optax.chain(inner, optax.masked(polar.balance_neurons(), of_matrices))
  rule = chosen.apart(inner, is_muon)
  return with_decoupled_decay(rule, learning_rate, weight_decay, decay_mask)
