"""Beam search over a function that gives the next token's logits, as `Translator.step` does."""

import functools
from typing import Any, Callable, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

# Maps the tokens [batch, beams] at place t, t, and a cache whose arrays are [batch, beams, ...] to
# logits [batch, beams, vocab] of the tokens that follow, and the next cache.
Step = Callable[[jax.Array, jax.Array, Any], tuple[jax.Array, Any]]


class Special(NamedTuple):
  """The ids of a vocabulary that do not stand for words."""

  bos: int
  eos: int
  pad: int


class Hypotheses(NamedTuple):
  """Sequences that end with eos, the best first.

  Attributes:
    ids: [batch, beams, length], int32, padded after eos; the first token, bos, is left out.
    scores: [batch, beams], log-probability over length penalty; -inf where no sequence was found.
  """

  ids: jax.Array
  scores: jax.Array


def penalty(length: Any, alpha: Any) -> jax.Array:
  """((5 + length) / 6)^alpha of a length that counts eos (Wu et al., 2016, GNMT, Equation 14)."""
  return ((5.0 + length) / 6.0) ** alpha


class _Search(NamedTuple):
  """State of a beam search before place t."""

  t: jax.Array
  live: Hypotheses  # their scores are log-probabilities; -inf: none
  finished: Hypotheses
  cache: Any  # of the live ones


def beam_search(
  step: Step, cache: Any, batch: int, *, beams: int, length: int, special: Special, alpha: Any = 0.6
) -> Hypotheses:
  """The best sequences that a beam of hypotheses finds.

  Each step extends the live hypotheses by every token and ranks the results by log-probability. One
  of the first `beams` that ends with eos is finished and kept with its score; the first others
  stay live. The search of an example ends when `beams` are finished, or when no live one can score
  more than the best; its result does not depend on the rest of the batch. At the last place only
  eos is allowed, so that every result ends. With one beam this is greedy search.

  Args:
    step: see `Step`. Places are 0, 1, ...; the token at 0 is bos.
    cache: of the first place.
    batch: number of examples.
    beams: hypotheses of an example.
    length: most tokens of a sequence, eos counted.
    special: ids; bos and pad are never predicted.
    alpha: of `penalty`, at least 0, by which log-probabilities are divided.

  Returns:
    ids int32 [batch, beams, length], padded after eos, and scores [batch, beams], the best first.
  """
  empty = jnp.full((batch, beams, length), special.pad, jnp.int32)
  nothing = Hypotheses(empty, jnp.full((batch, beams), -jnp.inf))
  live = nothing._replace(scores=nothing.scores.at[:, 0].set(0.0))  # all begin alike: one counts
  start = _Search(jnp.int32(0), live, nothing, cache)

  def advance(search):
    t, live = search.t, search.live
    last = jnp.where(t == 0, special.bos, live.ids[:, :, t - 1])
    logits, cache = step(last, t, search.cache)
    log_probs = live.scores[..., None] + _allowed(logits, t, length, special)
    # Each beam has one candidate that ends: among 2 * beams at least `beams` go on.
    scores, flat = jax.lax.top_k(log_probs.reshape(batch, -1), 2 * beams)
    parents, tokens = jnp.divmod(flat, log_probs.shape[-1])
    ids = _rows(live.ids, parents).at[:, :, t].set(tokens)
    ends = tokens == special.eos
    keep = ends & (jnp.arange(2 * beams) < beams)
    ended = Hypotheses(ids, jnp.where(keep, scores / penalty(t + 1, alpha), -jnp.inf))
    both = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), search.finished, ended)
    finished = _best(both, beams)[0]
    live, chosen = _best(Hypotheses(ids, jnp.where(ends, -jnp.inf, scores)), beams)
    cache = jax.tree.map(lambda x: _rows(x, _rows(parents, chosen)), cache)
    # Log-probabilities only fall, and no penalty divides them by more than the last.
    bound = live.scores[:, 0] / penalty(length, alpha)
    done = jnp.isfinite(finished.scores).all(axis=1) | (finished.scores[:, 0] >= bound)
    live = live._replace(scores=jnp.where(done[:, None], -jnp.inf, live.scores))
    return _Search(t + 1, live, finished, cache)

  alive = lambda s: (s.t < length) & jnp.isfinite(s.live.scores).any()
  finished = jax.lax.while_loop(alive, advance, start).finished
  found = jnp.isfinite(finished.scores)[..., None]
  return finished._replace(ids=jnp.where(found, finished.ids, special.pad))


def _allowed(logits: jax.Array, t: jax.Array, length: int, special: Special) -> jax.Array:
  """Log-probabilities, -inf for bos and pad, and at the last place for all but eos."""
  log_probs = nn.log_softmax(logits.astype(jnp.float32))
  token = jnp.arange(logits.shape[-1])
  never = (token == special.bos) | (token == special.pad)
  return jnp.where(never | ((t == length - 1) & (token != special.eos)), -jnp.inf, log_probs)


def _rows(x: jax.Array, index: jax.Array) -> jax.Array:
  """x[i, index[i]] of each example i."""
  return jnp.take_along_axis(x, index.reshape(*index.shape, *(1,) * (x.ndim - 2)), axis=1)


def _best(some: Hypotheses, beams: int) -> tuple[Hypotheses, jax.Array]:
  """The best ones, in order, and their places."""
  scores, index = jax.lax.top_k(some.scores, beams)
  return Hypotheses(_rows(some.ids, index), scores), index


@functools.partial(jax.jit, static_argnames=("model", "length", "special", "beams", "mesh"))
def translate(
  model: nn.Module,
  variables: Any,
  source_ids: jax.Array,
  source_mask: jax.Array,
  *,
  length: int,
  special: Special,
  beams: int = 4,
  alpha: Any = 0.6,
  mesh: Mesh | None = None,
) -> Hypotheses:
  """Translations of sources [batch, n] by a `Translator`; compiled once for each shape and length.

  Each device of a mesh searches for its part of the batch without waiting for the others (XLA would
  gather all scores before each `top_k`); the number of devices has to divide the batch. Other
  arguments are those of `beam_search`. Raises a ValueError if `length` is more than the model's
  max_length.
  """

  def search(variables, ids, mask, alpha):
    sizes = dict(beams=beams, length=length)
    memory, cache = model.apply(variables, ids, mask, **sizes, method="start")
    step = lambda ids, t, cache: model.apply(variables, ids, t, memory, cache, method="step")
    return beam_search(step, cache, len(ids), **sizes, special=special, alpha=alpha)

  if mesh is not None:
    whole, rows = PartitionSpec(), PartitionSpec(mesh.axis_names)
    specs = dict(in_specs=(whole, rows, rows, whole), out_specs=rows)
    search = jax.shard_map(search, mesh=mesh, check_vma=False, **specs)
  return search(variables, source_ids, source_mask, alpha)
