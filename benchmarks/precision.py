"""Error of a K-FAC step by the condition of its factors and the precision of its products.

Devices multiply float32 arrays in passes of fewer bits: a TPU bfloat16, NVIDIA's GPUs TF32. No CPU
does; here the operands of every product are rounded to that many bits, and their remainders are
multiplied in further passes, as XLA's "default", "high" and "highest" have it. Sums are float32. The
step A^-1 V G^-1 is compared with float64; that of a basis with the same renewal of the basis, from
that of factors a little older, in float64.
"""

import contextlib
from typing import Any, Iterator
from unittest import mock

import jax
from jax._src.lax import lax as products  # `@` looks for dot_general there
import jax.numpy as jnp
import numpy as np

from benchmarks import tables
from mixer_jax.optim import linalg

SIZE = 256
CONDITIONS = (1e1, 1e2, 1e3, 1e4, 1e5)
# Bits of an operand after the first, and parts that it is split into.
PRECISIONS = {
  "bfloat16, one pass": (7, 1),
  "TF32, one pass": (10, 1),
  "bfloat16, three passes": (7, 2),
  "TF32, three passes": (10, 2),
  "bfloat16, six passes": (7, 3),
  "float32": (23, 1),
}
METHODS = ("library", "products")


def parts(x: jax.Array, bits: int, count: int) -> list[jax.Array]:
  """x as a sum of `count` numbers of few bits, the largest first."""
  found = []
  for _ in range(count):
    found.append(jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=bits))
    x = x - found[-1]
  return found


@contextlib.contextmanager
def multiplying(bits: int, count: int) -> Iterator[None]:
  """Products of float32 arrays that are traced inside have operands of few bits."""
  whole = products.dot_general

  def rounded(x: Any, y: Any, *args: Any, **options: Any) -> jax.Array:
    if x.dtype != jnp.float32:
      return whole(x, y, *args, **options)
    xs, ys = (parts(z, bits, count) for z in (x, y))
    pairs = [(i, j) for i in range(count) for j in range(count) if i + j < count]
    return sum(whole(xs[i], ys[j], *args, **options) for i, j in reversed(pairs))

  with mock.patch.object(products, "dot_general", rounded):
    yield


def factor(condition: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
  """A positive definite matrix with eigenvalues from 1 to 1 / condition, and one a little older."""
  rng = np.random.default_rng(seed)
  vectors = np.linalg.qr(rng.normal(size=(SIZE, SIZE)))[0]
  now = (vectors * np.geomspace(1, 1 / condition, SIZE)) @ vectors.T
  drift = rng.normal(size=(SIZE, 4 * SIZE)) @ np.diag(rng.uniform(size=4 * SIZE))
  root = (vectors * np.geomspace(1, 1 / condition, SIZE) ** 0.5) @ vectors.T
  older = root @ (np.eye(SIZE) + 0.1 * (drift @ drift.T / SIZE)) @ root
  return now, older


def by_inverses(a: jax.Array, g: jax.Array, v: jax.Array, *_: jax.Array, method: str) -> jax.Array:
  return linalg.inverse(a, method) @ v @ linalg.inverse(g, method)


def by_bases(
  a: jax.Array, g: jax.Array, v: jax.Array, before: jax.Array, other: jax.Array, method: str
) -> jax.Array:
  """The step in bases that one iteration turned, with Rayleigh quotients for eigenvalues."""
  (q, _), (r, _) = linalg.turned(a, before, method), linalg.turned(g, other, method)
  quotients = lambda f, q: jnp.sum(q * (f @ q), axis=0)
  scale = quotients(a, q)[:, None] * quotients(g, r)
  return q @ ((q.T @ v @ r) / scale) @ r.T


STEPS = {"inverses": by_inverses, "bases": by_bases}


def error(kind: str, method: str, condition: float, bits: int, count: int) -> float:
  """Relative error (Frobenius) of a step of float32 arrays against one of float64."""
  (a, old_a), (g, old_g) = factor(condition, 0), factor(condition, 1)
  v = np.random.default_rng(2).normal(size=(SIZE, SIZE))
  bases = [np.linalg.eigh(f)[1][:, ::-1] for f in (old_a, old_g)]
  step = lambda method: lambda *x: STEPS[kind](*x, method=method)
  jax.clear_caches()
  with jax.enable_x64(True):
    operands = [jnp.asarray(np.ascontiguousarray(x)) for x in (a, g, v, *bases)]
    exact = np.asarray(jax.jit(step("library"))(*operands))
  few = [jnp.asarray(x, jnp.float32) for x in (a, g, v, *bases)]
  jax.clear_caches()  # of the products that jnp.matmul was traced with before
  with multiplying(bits, count):
    found = jax.jit(step(method))(*few)
  return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def main(_: Any) -> None:
  def measured() -> Iterator[list[str]]:
    for kind in STEPS:
      for method in METHODS:
        for name, (bits, count) in PRECISIONS.items():
          cells = [error(kind, method, condition, bits, count) for condition in CONDITIONS]
          yield [kind, method, name, *(f"{cell:.1e}" for cell in cells)]

  titles = "kind", "linear algebra", "products", *(f"condition {c:.0e}" for c in CONDITIONS)
  tables.show(titles, measured(), texts=3)
