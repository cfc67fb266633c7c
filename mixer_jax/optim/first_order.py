"""First-order optimizers as chains that end in a learning rate.

`decay_mask` is as in `optax.add_decayed_weights`: a function of the parameters
or None, which decays all of them.
"""

from typing import Annotated, Any

import optax

from mixer_jax.options import TINY, Option, OptionsOf

Transform = optax.GradientTransformation

_Momentum = Annotated[float, Option("decay of the momentum", 0, 0.99999)]
_Decay = Annotated[float, Option("weight decay", 0)]
_B1 = Annotated[float, Option("decay of the first moments", 0, 0.99999)]
_B2 = Annotated[float, Option("decay of the second moments", 0, 0.99999999)]
_Eps = Annotated[float, Option("added to the root of the second moments", TINY)]


def _decayed(
  rule: Transform, learning_rate: Any, *, weight_decay: _Decay = 0.0, decay_mask: Any = None
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
  learning_rate: Any, *, b1: _B1 = 0.9, b2: _B2 = 0.999, eps: _Eps = 1e-8, **decay: _L2
) -> Transform:
  """Adam (Kingma and Ba, 2015) with weight decay inside the gradient (L2).

  The K-FAC study's code calls this Adam; `adamw` decouples the decay.
  """
  return _decayed(optax.scale_by_adam(b1, b2, eps), learning_rate, **decay)


def adamw(
  learning_rate: Any,
  *,
  b1: _B1 = 0.9,
  b2: _B2 = 0.999,
  eps: _Eps = 1e-8,
  weight_decay: _Decay = 1e-2,
  decay_mask: Any = None,
) -> Transform:
  """AdamW (Loshchilov and Hutter, 2019): the decay bypasses the moments."""
  return optax.adamw(learning_rate, b1, b2, eps, weight_decay=weight_decay, mask=decay_mask)


def lamb(
  learning_rate: Any,
  *,
  b1: _B1 = 0.9,
  b2: _B2 = 0.999,
  eps: _Eps = 1e-6,
  weight_decay: _Decay = 0.0,
  decay_mask: Any = None,
) -> Transform:
  """LAMB (You et al., 2020), the optimizer of ResMLP's recipes."""
  return optax.lamb(learning_rate, b1, b2, eps, weight_decay=weight_decay, mask=decay_mask)


def adagrad(
  learning_rate: Any,
  *,
  initial_accumulator: Annotated[float, Option("sum of squares to start from", 0)] = 0.1,
  eps: _Eps = 1e-7,
  **decay: _L2,
) -> Transform:
  """Adagrad (Duchi et al., 2011) with weight decay inside the gradient."""
  return _decayed(optax.scale_by_rss(initial_accumulator, eps), learning_rate, **decay)
