"""First-order optimizers as chains that end in a learning rate.

`decay_mask` is as in `optax.add_decayed_weights`: a function of the parameters
or None, which decays all of them.
"""

from typing import Any

import optax


def sgd(
  learning_rate: Any,
  *,
  momentum: float = 0.9,
  nesterov: bool = False,
  weight_decay: float = 0.0,
  decay_mask: Any = None,
) -> optax.GradientTransformation:
  """SGD with momentum; weight decay is part of the gradient, as in PyTorch."""
  return optax.chain(
    optax.add_decayed_weights(weight_decay, decay_mask),
    optax.trace(momentum, nesterov),
    optax.scale_by_learning_rate(learning_rate),
  )


def adam(
  learning_rate: Any,
  *,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
  weight_decay: float = 0.0,
  decay_mask: Any = None,
) -> optax.GradientTransformation:
  """Adam (Kingma and Ba, 2015) with weight decay inside the gradient (L2).

  This is what the K-FAC study's code calls Adam; `adamw` decouples the decay.
  """
  return optax.chain(
    optax.add_decayed_weights(weight_decay, decay_mask),
    optax.scale_by_adam(b1, b2, eps),
    optax.scale_by_learning_rate(learning_rate),
  )


def adamw(
  learning_rate: Any,
  *,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
  weight_decay: float = 1e-2,
  decay_mask: Any = None,
) -> optax.GradientTransformation:
  """AdamW (Loshchilov and Hutter, 2019): the decay bypasses the moments."""
  return optax.adamw(learning_rate, b1, b2, eps, weight_decay=weight_decay, mask=decay_mask)


def lamb(
  learning_rate: Any,
  *,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-6,
  weight_decay: float = 0.0,
  decay_mask: Any = None,
) -> optax.GradientTransformation:
  """LAMB (You et al., 2020), the optimizer of ResMLP's recipes."""
  return optax.lamb(learning_rate, b1, b2, eps, weight_decay=weight_decay, mask=decay_mask)


def adagrad(
  learning_rate: Any,
  *,
  initial_accumulator: float = 0.1,
  eps: float = 1e-7,
  weight_decay: float = 0.0,
  decay_mask: Any = None,
) -> optax.GradientTransformation:
  """Adagrad (Duchi et al., 2011) with weight decay inside the gradient."""
  return optax.chain(
    optax.add_decayed_weights(weight_decay, decay_mask),
    optax.scale_by_rss(initial_accumulator, eps),
    optax.scale_by_learning_rate(learning_rate),
  )
