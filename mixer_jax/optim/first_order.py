"""First-order optimizers as chains that end in a learning rate.

Of a gradient g of parameters w with weight decay l, the rule of an optimizer gets g + l w (L2), or
l w is added to the update that it makes of g (decoupled).

All take

  learning_rate   a number, or a schedule of the update count;
  weight_decay    l, a number or a schedule;
  decay_mask      as in `optax.add_decayed_weights`: a function of the parameters, or a tree of
                  bools like them; None decays all;

and raise a ValueError that names an option out of range, and a TypeError for one that they lack.
"""

import re
from typing import Annotated, Any, Mapping

import jax
import numpy as np
import optax
import optax.contrib

from mixer_jax import options
from mixer_jax.optim import curvature_options
from mixer_jax.optim.block_trees import by_path, check_stacked, output_axes
from mixer_jax.optim.curvature_blocks import path_name
from mixer_jax.options import TINY, Option

Transform = optax.GradientTransformation

Momentum = Annotated[float, Option("decay of the momentum", 0, 0.99999)]
Decay = Annotated[float, Option("weight decay", 0)]
B1 = Annotated[float, Option("decay of the first moments", 0, 0.99999)]
B2 = Annotated[float, Option("decay of the second moments", 0, 0.9999999)]
Eps = Annotated[float, Option("added to the root of the second moments", TINY)]
Rms = Annotated[float, Option("root mean square of an update of a kernel", TINY)]
NOT_BY_MUON = r"(^|/)(head|embedding)(/|$)"  # they take Adam, as is usual
AdamPaths = Annotated[
  str,
  Option('regular expression of kernels that take Adam, beside all that is no kernel; "": none'),
]


def add_decayed_weights(weight_decay: Any, decay_mask: Any) -> Transform:
  """`optax.add_decayed_weights`, whose updates keep their types: a schedule gives float32 numbers."""
  inner = optax.add_decayed_weights(weight_decay, decay_mask)

  def update_fn(updates, state, params=None):
    decayed, state = inner.update(updates, state, params)
    return jax.tree.map(lambda u, d: d.astype(u.dtype), updates, decayed), state

  return optax.GradientTransformation(inner.init, update_fn)


def _with_l2(
  rule: Transform, learning_rate: Any, *, weight_decay: Decay = 0.0, decay_mask: Any = None
) -> Transform:
  """A rule for gradients with L2 regularisation."""
  decay = add_decayed_weights(weight_decay, decay_mask)
  return optax.chain(decay, rule, optax.scale_by_learning_rate(learning_rate))


def with_decoupled_decay(
  rule: Transform, learning_rate: Any, weight_decay: Any, decay_mask: Any
) -> Transform:
  """A rule with decoupled decay, as in AdamW."""
  decay = add_decayed_weights(weight_decay, decay_mask)
  return optax.chain(rule, decay, optax.scale_by_learning_rate(learning_rate))


@curvature_options.checked(_with_l2)
def sgd(
  learning_rate: Any,
  *,
  momentum: Momentum = 0.9,
  nesterov: Annotated[bool, Option("Nesterov's momentum")] = False,
  **options: Any,
) -> Transform:
  """SGD with momentum and L2 regularisation: m <- momentum m + g, an update of -rate m.

  As in PyTorch; with `nesterov` the update is -rate (momentum m + g).
  """
  return _with_l2(optax.trace(momentum, nesterov), learning_rate, **options)


@curvature_options.checked(_with_l2)
def adam(
  learning_rate: Any, *, b1: B1 = 0.9, b2: B2 = 0.999, eps: Eps = 1e-8, **options: Any
) -> Transform:
  """Adam (Kingma and Ba, 2015, https://arxiv.org/abs/1412.6980, Algorithm 1) with L2 regularisation.

  The K-FAC study's code calls this Adam; `adamw` decouples the decay.
  """
  return _with_l2(optax.scale_by_adam(b1, b2, eps), learning_rate, **options)


@curvature_options.checked()
def adamw(
  learning_rate: Any,
  *,
  b1: B1 = 0.9,
  b2: B2 = 0.999,
  eps: Eps = 1e-8,
  weight_decay: Decay = 1e-2,
  decay_mask: Any = None,
) -> Transform:
  """AdamW (Loshchilov and Hutter, 2019, https://arxiv.org/abs/1711.05101, Algorithm 2): decoupled.

  As in PyTorch and optax, but not in the paper, the decay is multiplied by the learning rate.
  """
  rule = optax.scale_by_adam(b1, b2, eps)
  return with_decoupled_decay(rule, learning_rate, weight_decay, decay_mask)


@curvature_options.checked()
def lamb(
  learning_rate: Any,
  *,
  b1: B1 = 0.9,
  b2: B2 = 0.999,
  eps: Eps = 1e-6,
  weight_decay: Decay = 0.0,
  decay_mask: Any = None,
) -> Transform:
  """LAMB (You et al., 2020, https://arxiv.org/abs/1904.00962, Algorithm 2), of ResMLP's recipes.

  As in the code that trained ResMLP (FusedLAMB of apex), a parameter without weight decay, by its
  mask, makes Adam's step: a bias that starts at 0 would hardly grow by steps of its own length.
  """
  adapted = optax.scale_by_trust_ratio()
  return optax.chain(
    optax.scale_by_adam(b1, b2, eps),
    add_decayed_weights(weight_decay, decay_mask),
    adapted if decay_mask is None else optax.masked(adapted, decay_mask),
    optax.scale_by_learning_rate(learning_rate),
  )


@curvature_options.checked(_with_l2)
def adagrad(
  learning_rate: Any,
  *,
  initial_accumulator: Annotated[float, Option("sum of squares to start from", 0)] = 0.1,
  eps: Annotated[float, Option("added to the sum of squares, under the root", TINY)] = 1e-7,
  **options: Any,
) -> Transform:
  """Adagrad (Duchi et al., 2011, https://jmlr.org/papers/v12/duchi11a.html) with L2 regularisation."""
  return _with_l2(optax.scale_by_rss(initial_accumulator, eps), learning_rate, **options)


def takes_adam(name: str, adam_paths: str) -> bool:
  """Whether `adam_paths`, a regular expression, matches a parameter; "" matches none."""
  return bool(adam_paths and re.search(adam_paths, name))


def check_adam_paths(adam_paths: str, params: Any) -> None:
  """Raises a ValueError for `adam_paths` that match no parameter, unless they are the default."""
  if adam_paths != NOT_BY_MUON and (names := tuple(by_path(params))):
    curvature_options.matching("adam_paths", adam_paths, names)


def _matrices(params: Any, adam_paths: str, stacked: Mapping[str, int]) -> Any:
  """The axes of each kernel as a matrix, None for parameters that take Adam; see `muon`."""
  check_stacked(params, stacked)
  leaves = by_path(params)

  def matrix(path, x):
    name = path_name(path)
    axes = range(first := stacked.get(name, 0), np.ndim(x))
    if name.split("/")[-1] != "kernel" or len(axes) < 2 or takes_adam(name, adam_paths):
      return None
    outputs = output_axes(name, leaves, first)
    return optax.contrib.MuonDimensionNumbers(tuple(axes[:-outputs]), tuple(axes[-outputs:]))

  found = jax.tree_util.tree_map_with_path(matrix, params)
  if leaves and not jax.tree.leaves(found):
    raise ValueError(
      f"no kernel is left for Muon; the parameters are {', '.join(leaves)}: pass dimension_numbers,"
      " or take adamw"
    )
  return found


@curvature_options.checked()
def muon(
  learning_rate: Any,
  *,
  momentum: Momentum = 0.95,
  nesterov: Annotated[bool, Option("Nesterov's momentum")] = True,
  rms: Rms = 0.2,
  b1: B1 = 0.9,
  b2: B2 = 0.999,
  eps: Eps = 1e-8,
  adam_paths: AdamPaths = NOT_BY_MUON,
  dimension_numbers: Any = None,
  stacked: Mapping[str, int] | None = None,
  weight_decay: Decay = 1e-2,
  decay_mask: Any = None,
) -> Transform:
  """Muon (Jordan, 2024) for kernels, Adam for the rest, one rate for both, as optax has it.

  An update of a kernel has the root mean square `rms`, as one of Adam has about (Liu et al., 2025,
  https://arxiv.org/abs/2502.16982, Section 2.2). The head and embeddings take Adam, as is usual.

  Kernels are the parameters of that name with two axes or more. One of more than two axes is a
  matrix [inputs, outputs] with as many axes of outputs as its bias has, without a bias in sight the
  last alone, but two of a query, key or value of Linen's attention. A stack of layers, as of
  `nn.scan` or `nn.vmap`, cannot be told from these by its shape: `stacked` names it.

  Args:
    learning_rate: a number or a schedule of the update count.
    momentum: decay of the momentum.
    nesterov: whether the momentum is Nesterov's, that of Adam, too: it is NAdam then.
    rms: root mean square of an update of a kernel, at a rate of 1.
    b1: of Adam, as are b2 and eps; of NAdam with `nesterov`.
    adam_paths: a regular expression of kernels that take Adam; "" for none.
    dimension_numbers: a tree of `optax.contrib.MuonDimensionNumbers`, or None for Adam, or a function
      from parameters to it, instead of these rules and `adam_paths`.
    stacked: how many leading axes of a parameter, by path, count layers; each layer is a matrix.
    weight_decay: decoupled.
    decay_mask: as in `optax.add_decayed_weights`.

  Raises:
    ValueError: an option out of range; or, of the parameters, `stacked` or one's own `adam_paths`
      names none, or no kernel is left for Muon.
  """

  if isinstance(dimension_numbers, str | bytes | int | float | np.ndarray | jax.Array):
    allowed = (
      "None, a tree of optax.contrib.MuonDimensionNumbers, or a function from parameters to it"
    )
    raise ValueError(f"dimension_numbers is {options.shown(dimension_numbers)}; allowed: {allowed}")

  def chain(params):
    # Of the whole tree: optax asks a function for parts of it, where a kernel's bias is missing.
    own = dimension_numbers
    if own is None:
      own = _matrices(params, adam_paths, stacked or {})
    rule = optax.contrib.muon(
      1.0,
      beta=momentum,
      nesterov=nesterov,
      adam_b1=b1,
      adam_b2=b2,
      eps=eps,
      muon_weight_dimension_numbers=own,
      consistent_rms=rms,
    )
    decay = add_decayed_weights(weight_decay, decay_mask)
    return optax.chain(rule, optax.scale(-1.0), decay, optax.scale_by_learning_rate(learning_rate))

  def init_fn(params):
    check_adam_paths(adam_paths, params)
    return chain(params).init(params)

  def update_fn(updates, state, params=None, **extra):
    return chain(updates).update(updates, state, params, **extra)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
