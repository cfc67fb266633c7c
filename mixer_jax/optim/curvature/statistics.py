"""From the sums that taps add up to the factors of each layer.

With B examples, T rows of an example that share the weights (tokens, places of a convolution,
uses in a loop or in a derivative), and d the gradient of the loss of one example:

  token_averaging  A                    G                 used by
  "published"      sum a a^T / (B T)    T/B sum d d^T     the K-FAC study's code
  "expand"         sum a a^T / (B T)    1/B sum d d^T     kfac-jax (its product),
                                                          Eschenhagen et al., 2023

The published code treats convolutions (its patch embedding) apart: there
A = sum a a^T / (B T^2), so that its product equals that of "expand".
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mixer_jax.optim.curvature.blocks import Block, Diagonal, Diagonals, Kronecker

# Uses multiply by the layer's matrix, or by its transpose: a head that shares its weights with an
# embedding, and the products of a derivative in reverse mode.
USE, TRANSPOSED = "use", "transposed"
# What does not depend on the labels.
_FIXED = frozenset({"rows", "basis"})


class Layer(NamedTuple):
  """A Kronecker block with what its statistics need.

  Attributes:
    block: the block.
    patches: whether its rows are a convolution's patches.
    kinds: of its uses, `USE` and `TRANSPOSED`.
    masked: whether a constant mask hides some elements of the matrix.
  """

  block: Block
  patches: bool
  kinds: tuple[str, ...]
  masked: bool = False

  def accumulators(self, basis: Any) -> dict[str, Any]:
    """Zeros for the sums of each kind; with the basis of EK-FAC's second moments, if there is one."""
    block = self.block
    zeros = lambda *shape: jnp.zeros((*block.stacked, *shape), block.dtype)
    shape = lambda i: block.factor_sizes[i : i + 1] * (1 if block.diagonal[i] else 2)
    own = {"inputs": zeros(*shape(0)), "outputs": zeros(*shape(1)), "rows": zeros()}
    if basis is not None:
      own["squares"] = zeros(*block.factor_sizes)
      sides = zip(("inputs", "outputs"), basis)
      own["basis"] = {side: eigen.vectors for side, eigen in sides if eigen.vectors is not None}
    return {kind: dict(own) for kind in self.kinds}

  def scale(self, tokens: Any) -> Any:
    """The factor by which "published" multiplies the product of "expand"."""
    return 1.0 if self.patches else tokens

  def squares(self, sums: Any, examples: jax.Array, published: bool) -> jax.Array:
    """Second moments of the gradients of examples, [*stacked, d_in, d_out]."""
    total = 0.0
    for own in sums.values():
      tokens = jnp.maximum(own["rows"], 1.0) / jnp.maximum(examples, 1.0)
      scale = self.scale(tokens[..., None, None]) if published else 1.0
      total = total + own["squares"] * scale  # a mean: `root_weights` scale the gradients
    return total

  def factors(self, sums: Any, examples: jax.Array, published: bool) -> Kronecker:
    """Means from the sums over rows of so many examples."""
    pairs = [self._pair(sums[kind], kind, examples, published) for kind in sorted(sums)]
    inputs, outputs = pairs[0] if len(pairs) == 1 else _mixed(pairs, self.block.diagonal)
    wrap = lambda x, side: Diagonals(x) if self.block.diagonal[side] else x
    return Kronecker(wrap(inputs, 0), wrap(outputs, 1))

  def _pair(self, sums, kind, examples, published):
    # An empty batch of a part of the outputs divides by 1; fractions of a row are those of terms.
    rows = jnp.where(sums["rows"] > 0, sums["rows"], 1.0)
    tokens = rows / jnp.maximum(examples, 1.0)
    acts, grads = (0, 1) if kind == USE else (1, 0)
    names = ("inputs", "outputs")
    spread = lambda x, side: x.reshape(*x.shape, *(1,) * (2 - self.block.diagonal[side]))
    a, g = sums[names[acts]] / spread(rows, acts), sums[names[grads]]
    if published:
      g = g * spread(tokens, grads)
      a = a / spread(tokens, acts) if self.patches else a
    return (a, g) if kind == USE else (g, a)


def _mixed(pairs: list[tuple[Any, Any]], diagonal: tuple[bool, bool]) -> tuple[Any, Any]:
  """One Kronecker product for a sum of several, of uses and transposed ones.

  Inputs of one kind stand on the side of the other's gradients, so units differ: the factors of
  each, of trace 1, are mixed in the proportion of the traces t of the products, and their product
  has the trace sum t.
  """
  trace = lambda x, side: x.sum(-1) if diagonal[side] else jnp.trace(x, axis1=-2, axis2=-1)
  tiny = jnp.finfo(pairs[0][0].dtype).tiny
  whole = [trace(a, 0) * trace(g, 1) for a, g in pairs]
  total = sum(whole)
  sides = []
  for i in range(2):
    spread = lambda x, i=i: x.reshape(*x.shape, *(1,) * (2 - diagonal[i]))
    unit = [pair[i] / spread(jnp.maximum(trace(pair[i], i), tiny)) for pair in pairs]
    mix = sum(spread(t / jnp.maximum(total, tiny)) * x for t, x in zip(whole, unit))
    sides.append(mix * spread(jnp.sqrt(total)))
  return tuple(sides)


def inputs_once(once: Any, total: Any) -> Any:
  """The sums of one block: those of inputs from one pass, those of gradients from all."""
  merged = {}
  for kind, sums in total.items():
    if kind not in (USE, TRANSPOSED):
      merged[kind] = sums
      continue
    fixed = _FIXED | {"inputs" if kind == USE else "outputs"}
    merged[kind] = {name: once[kind][name] if name in fixed else x for name, x in sums.items()}
  return merged


def of_terms(terms: list[tuple[Any, jax.Array]]) -> tuple[Any, jax.Array]:
  """The sums of parts of the outputs with batches of their own, as those of one example.

  Each term counts by its own number of examples: A is the mean over all rows that the example of
  each term has, G the sum over terms.
  """
  if len(terms) == 1:
    return terms[0]
  total: dict[str, Any] = {}
  for sums, examples in terms:
    for kind, own in sums.items():
      acts = "inputs" if kind == USE else "outputs"
      mean = {n: x / examples if n in ("rows", acts) else x for n, x in own.items()}
      total[kind] = jax.tree.map(jnp.add, total[kind], mean) if kind in total else mean
  return total, jnp.float32(1.0)


def diagonal(squares: jax.Array) -> Diagonal:
  """The block of a parameter whose mean squared gradients these are, of its shape."""
  return Diagonal((squares,))
