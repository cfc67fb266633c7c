"""Whether the gradient of the first update is that of the loss which the likelihood is of."""

from typing import Any, Callable

import jax
import jax.numpy as jnp

from mixer_jax.optim.curvature import report
from mixer_jax.optim.curvature.predictor import Predictor, root_weights
from mixer_jax.optim.trees import by_path

_SAME_GRADIENT = 0.5  # cosine, below which a gradient is of another loss
# Logarithm of the ratio of lengths, above which the scale of a loss is another one.
_SAME_LENGTH = 0.4


def loss_of(predictor: Predictor) -> Callable[[Any, Any], jax.Array]:
  """A function whose gradient is that of the likelihood's loss; its value is not the loss's."""

  def loss(params, batch):
    answer = predictor.answer(params, batch)
    if answer.targets is None:
      raise ValueError("per_example_grads needs predict to return (outputs, targets)")
    outputs = jax.tree.map(lambda y: y.astype(predictor.dtype), answer.outputs)
    slopes = jax.lax.stop_gradient(predictor.likelihood.slopes(outputs, answer.targets))
    scales = root_weights(predictor.weights(answer)[0], outputs, None)
    terms = jax.tree.map(lambda y, g, s: jnp.sum(y * g * s**2), outputs, slopes, scales)
    return sum(jax.tree.leaves(terms))

  return loss


def compare(
  gradients: Any, exact: Callable[[], Any], first: jax.Array, scale: bool, dtype: Any
) -> None:
  """Warns, in the first update, if directions (with `scale`, lengths, too) differ from the exact one's."""

  def compared():
    found = by_path(exact())
    both = [(g, found[path]) for path, g in by_path(gradients).items()]
    flat = [jnp.concatenate([x.astype(dtype).ravel() for x in side]) for side in zip(*both)]
    sizes = [jnp.linalg.norm(x) for x in flat]
    return jnp.vdot(*flat) / (sizes[0] * sizes[1]), sizes[0] / sizes[1]

  cosine, ratio = jax.lax.cond(first, compared, lambda: (jnp.ones((), dtype),) * 2)
  differs = cosine < _SAME_GRADIENT
  if scale:
    differs |= jnp.abs(jnp.log(ratio)) > _SAME_LENGTH
  tell = lambda: jax.debug.callback(_tell, cosine, ratio)
  jax.lax.cond(differs, tell, lambda: None)


def _tell(cosine: Any, ratio: Any) -> None:
  report.say(
    f"the gradient of the first update has a cosine of {float(cosine):.2f} with that of the likelihood's"
    f" loss, and {float(ratio):.3g} times its length: is predict, or the likelihood, another one than in"
    " the loss?"
  )
