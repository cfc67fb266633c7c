"""DINO's network, schedules and loss.

Caron et al., "Emerging Properties in Self-Supervised Vision Transformers", ICCV 2021,
https://arxiv.org/abs/2104.14294. Where its text leaves a choice, this follows the released code.

Five things differ from that code: gradients are clipped by the norm of all together, not of each
parameter; the teacher's temperature rises with each step, not with each epoch; the frozen last layer
has a gradient of zero, which Adam's moments count, and is not skipped; crops are bilinear, not
bicubic; small views are as large as others, unless the model takes any number of tokens.
"""

import dataclasses
import math
from typing import Annotated, Any, Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp

from mixer_jax.images.views import GLOBAL
from mixer_jax.models import layers
from mixer_jax.options import Option

_Width = lambda text: Annotated[int, Option(text, 2, 10**6)]
_Temperature = lambda text: Annotated[float, Option(text, 1e-3, 10)]
_Epochs = lambda text: Annotated[float, Option(text, 0)]
_COLLAPSE = "steps in a row with a teacher entropy within 1% of log out_dim, or of 0, that end a run; 0: never"


@dataclasses.dataclass(frozen=True)
class Dino:
  """The group `config.dino`, with the paper's defaults for 300 epochs of ImageNet."""

  out_dim: _Width("outputs of the head, K") = 65536
  hidden_dim: _Width("hidden width of the head") = 2048
  bottleneck_dim: _Width("width before the last layer of the head") = 256
  momentum: Annotated[
    float, Option("decay of the teacher's average at the first step; it rises to 1", 0, 1)
  ] = 0.996
  centre_momentum: Annotated[
    float, Option("decay of the centre of the teacher's outputs", 0, 1)
  ] = 0.9
  student_temperature: _Temperature("divides the student's outputs") = 0.1
  teacher_temperature: _Temperature("divides the teacher's outputs") = 0.07
  first_temperature: _Temperature("of the teacher at the first step") = 0.04
  temperature_epochs: _Epochs("in which it rises to teacher_temperature") = 30.0
  freeze_epochs: _Epochs("in which the last layer of the head stays as it is") = 1.0
  collapse_steps: Annotated[int, Option(_COLLAPSE, 0, free=True)] = 200


class UnitDense(nn.Module):
  """y = x W / |W|: the columns of W have length 1 (weight normalisation).

  The kernel has no Kronecker factors; K-FAC takes its plain gradient.
  """

  features: int

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps [..., inputs] to [..., features]."""
    inputs = x.shape[-1]
    start = layers.uniform_start(inputs)["kernel_init"]
    kernel = self.param("kernel", start, (inputs, self.features), jnp.float32)
    return x @ unit(kernel, axis=0)


class Head(nn.Module):
  """Three dense layers with GELU between them, a division by the length, and a `UnitDense`; float32.

  Kernels start with the deviation 1 / sqrt(inputs), which is the 0.02 of the released code for its
  2,048 inputs. With 0.02 in a narrow head, outputs would start so small that biases decide their
  direction, the same for all images.
  """

  hidden_dim: int
  bottleneck_dim: int
  out_dim: int

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps features [batch, any] to [batch, out_dim]."""
    for i, width in enumerate((self.hidden_dim, self.hidden_dim, self.bottleneck_dim)):
      x = layers.gelu(x, "exact") if i else x
      x = nn.Dense(width, name=f"Dense_{i}")(x)
    return UnitDense(self.out_dim, name="last")(unit(x, axis=-1))


class Network(nn.Module):
  """A model of images with DINO's head, the network of the student and of the teacher."""

  backbone: nn.Module
  head: Head

  def __call__(self, images: jax.Array, *, train: bool = False) -> jax.Array:
    """Maps [batch, height, width, 3] to [batch, out_dim]."""
    return self.head(self.backbone(images, train=train))


def unit(x: jax.Array, axis: int) -> jax.Array:
  """Divides the vectors along an axis by their lengths."""
  return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=axis, keepdims=True) + 1e-24)


def moved(teacher: Any, params: Any, rate: jax.Array) -> Any:
  """The teacher's parameters after an update: (1 - rate) teacher + rate params."""
  move = lambda old, new: old + rate * (jax.lax.stop_gradient(new) - old)
  return jax.tree.map(move, teacher, params)


def teacher_rate(step: jax.Array, num_steps: int, momentum: float) -> jax.Array:
  """One minus the momentum after a step (from 0); the momentum rises to 1 as a cosine."""
  return (1 - momentum) * 0.5 * (1 + jnp.cos(math.pi * step / num_steps))


def teacher_temperature(step: jax.Array, warmup_steps: float, how: Dino) -> jax.Array:
  """The teacher's temperature at a step (from 0), which rises linearly to its last value.

  It has that value after `warmup_steps`. In the released code it rises with each epoch, and has the
  last value in the last epoch of the warm-up.
  """
  done = jnp.minimum(step / warmup_steps, 1.0) if warmup_steps else 1.0
  return how.first_temperature + (how.teacher_temperature - how.first_temperature) * done


def pairs(views: int) -> jax.Array:
  """Whether a view of the student learns from a view of the teacher, bool [2, views].

  The first two views are the teacher's. A view learns from all of them but itself.
  """
  return jnp.arange(GLOBAL)[:, None] != jnp.arange(views)


def losses(logits: jax.Array, probabilities: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Cross-entropies of the views of images, and the weights that make DINO's loss their mean.

  Args:
    logits: the student's, divided by its temperature, [batch, views, K].
    probabilities: the teacher's, [batch, 2, K].

  Returns:
    The mean of each view over the teacher's views that it learns from, [batch, views], and the
    number of these views, [views].
  """
  learns = pairs(logits.shape[1]).astype(jnp.float32)
  normaliser = jax.nn.logsumexp(logits, axis=-1)[:, None]
  each = normaliser - jnp.einsum("btk,bvk->btv", probabilities, logits, precision="highest")
  count = learns.sum(axis=0)
  return jnp.sum(each * learns, axis=1) / count, count


def entropy(logits: jax.Array) -> jax.Array:
  """The mean entropy, in nats, of distributions with these logits [..., K]."""
  logs = jax.nn.log_softmax(logits)
  return -jnp.mean(jnp.sum(jnp.exp(logs) * logs, axis=-1))


def spread(features: jax.Array) -> jax.Array:
  """One minus the squared length of the mean direction of features [n, any]: 0 if all are parallel."""
  return 1 - jnp.sum(jnp.square(jnp.mean(unit(features, axis=-1), axis=0)))


def counted(collapsed: jax.Array, entropy: jax.Array, out_dim: int, limit: int) -> jax.Array:
  """The steps in a row with the entropy of a collapse, up to this one; it stays at `limit`."""
  share = entropy / math.log(out_dim)
  new = jnp.where((share > 0.99) | (share < 0.01), collapsed + 1, 0)
  return jnp.where((collapsed >= limit) & (limit > 0), collapsed, new)


def collapse(progress: Mapping[str, jax.Array], how: Dino) -> str:
  """Says that the teacher has collapsed, which ends a run; "" if it has not."""
  count = int(progress["collapsed"])
  if not how.collapse_steps or count < how.collapse_steps:
    return ""
  return (
    f"the teacher has collapsed: its entropy is {float(progress['entropy']):.4g} nats, within 1% of 0"
    f" or log out_dim, {math.log(how.out_dim):.4g}, for {count} steps. Try another"
    " dino.teacher_temperature, a lower learning_rate, a larger batch or dino.out_dim;"
    " dino.collapse_steps=0 goes on"
  )
