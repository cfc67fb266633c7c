"""First-order optimizers as chains that end in a learning rate.

`decay_mask` is as in `optax.add_decayed_weights`: a function of the parameters
or None, which decays all of them.
"""

import re
from typing import Annotated, Any

import jax
import optax
import optax.contrib

from mixer_jax.optim.curvature_blocks import path_name
from mixer_jax.options import TINY, Option, OptionsOf

Transform = optax.GradientTransformation

_Momentum = Annotated[float, Option("decay of the momentum", 0, 0.99999)]
Decay = Annotated[float, Option("weight decay", 0)]
B1 = Annotated[float, Option("decay of the first moments", 0, 0.99999)]
B2 = Annotated[float, Option("decay of the second moments", 0, 0.99999999)]
Eps = Annotated[float, Option("added to the root of the second moments", TINY)]


def _decayed(
  rule: Transform, learning_rate: Any, *, weight_decay: Decay = 0.0, decay_mask: Any = None
) -> Transform:
  """A rule for gradients that weight decay is part of (L2)."""
  decay = optax.add_decayed_weights(weight_decay, decay_mask)
  return optax.chain(decay, rule, optax.scale_by_learning_rate(learning_rate))


_L2 = Annotated[Any, OptionsOf(_decayed)]


def sgd(
  learning_rate: Any,
  *,
  momentum: _Momentum = 0.9,
  nesterov: Annotated[bool, Option("Nesterov's momentum")] = False,
  **decay: _L2,
) -> Transform:
  """SGD with momentum; weight decay is part of the gradient, as in PyTorch."""
  return _decayed(optax.trace(momentum, nesterov), learning_rate, **decay)


def adam(
  learning_rate: Any, *, b1: B1 = 0.9, b2: B2 = 0.999, eps: Eps = 1e-8, **decay: _L2
) -> Transform:
  """Adam (Kingma and Ba, 2015) with weight decay inside the gradient (L2).

  The K-FAC study's code calls this Adam; `adamw` decouples the decay.
  """
  return _decayed(optax.scale_by_adam(b1, b2, eps), learning_rate, **decay)


def adamw(
  learning_rate: Any,
  *,
  b1: B1 = 0.9,
  b2: B2 = 0.999,
  eps: Eps = 1e-8,
  weight_decay: Decay = 1e-2,
  decay_mask: Any = None,
) -> Transform:
  """AdamW (Loshchilov and Hutter, 2019): the decay bypasses the moments."""
  return optax.adamw(learning_rate, b1, b2, eps, weight_decay=weight_decay, mask=decay_mask)


def lamb(
  learning_rate: Any,
  *,
  b1: B1 = 0.9,
  b2: B2 = 0.999,
  eps: Eps = 1e-6,
  weight_decay: Decay = 0.0,
  decay_mask: Any = None,
) -> Transform:
  """LAMB (You et al., 2020), the optimizer of ResMLP's recipes.

  As in the code that trained ResMLP (FusedLAMB of apex), a parameter without weight decay, by its
  mask, makes Adam's step: a bias that starts at 0 would hardly grow by steps of its own length.
  """
  adapted = optax.scale_by_trust_ratio()
  return optax.chain(
    optax.scale_by_adam(b1, b2, eps),
    optax.add_decayed_weights(weight_decay, decay_mask),
    adapted if decay_mask is None else optax.masked(adapted, decay_mask),
    optax.scale_by_learning_rate(learning_rate),
  )


def adagrad(
  learning_rate: Any,
  *,
  initial_accumulator: Annotated[float, Option("sum of squares to start from", 0)] = 0.1,
  eps: Eps = 1e-7,
  **decay: _L2,
) -> Transform:
  """Adagrad (Duchi et al., 2011) with weight decay inside the gradient."""
  return _decayed(optax.scale_by_rss(initial_accumulator, eps), learning_rate, **decay)


def muon(
  learning_rate: Any,
  *,
  momentum: _Momentum = 0.95,
  nesterov: Annotated[bool, Option("Nesterov's momentum")] = True,
  rms: Annotated[float, Option("root mean square of an update of a kernel", TINY)] = 0.2,
  b1: B1 = 0.9,
  b2: B2 = 0.999,
  eps: Eps = 1e-8,
  adam_paths: Annotated[
    str, Option("regular expression of kernels that take Adam, beside all that is no kernel")
  ] = r"(^|/)(head|embedding)(/|$)",
  weight_decay: Decay = 1e-2,
  decay_mask: Any = None,
) -> Transform:
  """Muon (Jordan, 2024) for kernels, Adam for the rest, one rate for both.

  An update of a kernel has the root mean square `rms`, as one of Adam has about (Liu et al., 2025,
  https://arxiv.org/abs/2502.16982, Section 2.2). A kernel of more than two axes is a matrix of all
  axes but the last by the last. The head and embeddings take Adam, as is usual.
  """
  dimensions = optax.contrib.MuonDimensionNumbers

  def numbers(params):
    def of(path, x):
      by_adam = x.ndim < 2 or re.search(adam_paths, path_name(path))
      return None if by_adam else dimensions(tuple(range(x.ndim - 1)), x.ndim - 1)

    return jax.tree_util.tree_map_with_path(of, params)

  rule = optax.contrib.muon(
    1.0,
    beta=momentum,
    nesterov=nesterov,
    adam_b1=b1,
    adam_b2=b2,
    eps=eps,
    muon_weight_dimension_numbers=numbers,
    consistent_rms=rms,
  )
  decay = optax.add_decayed_weights(weight_decay, decay_mask)
  return optax.chain(rule, optax.scale(-1.0), decay, optax.scale_by_learning_rate(learning_rate))
