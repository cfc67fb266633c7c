"""SOAP and Shampoo against their published algorithms in NumPy, float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixer_jax import optim
from tests.optim.two_layers import kernels, power_iteration


def authors_soap(gradients, b1, b2, eps, period, decay, cut, tolerance):
  """Algorithm 3 of Vyas et al. for one matrix, with its first step, which only makes a basis.

  The side of rows has none if it is `cut`. Also how many bases were renewed, and how many stayed.
  """
  steps, mean, squares, renewed, stayed = [], 0.0, 0.0, 0, 0
  for t, g in enumerate(gradients):
    if t == 0:
      left, right = g @ g.T, g.T @ g
      ql, qr = (np.linalg.eigh(f)[1] for f in (left, right))
      ql = np.eye(len(ql)) if cut else ql
      steps.append(np.zeros_like(g))
      continue
    mean = b1 * mean + (1 - b1) * g
    squares = b2 * squares + (1 - b2) * (ql.T @ g @ qr) ** 2
    ratio = (ql.T @ mean @ qr) / (1 - b1**t)
    steps.append(ql @ (ratio / (np.sqrt(squares / (1 - b2**t)) + eps)) @ qr.T)
    # An average of which the weights add up to 1 has the eigenvectors of the authors'.
    weight = (1 - decay) / (1 - decay ** (t + 1))
    left = (1 - weight) * left + weight * g @ g.T
    right = (1 - weight) * right + weight * g.T @ g
    if t % period == 0:
      for factor, q, axis in ((left, ql, 0), (right, qr, 1)):
        if axis == 0 and cut:
          continue
        inside = q.T @ factor @ q
        apart = np.linalg.norm(inside - np.diag(np.diag(inside))) / np.linalg.norm(inside)
        if tolerance is not None and apart <= tolerance:
          stayed += 1
          continue
        renewed += 1
        new, order = power_iteration(factor, q)
        squares = np.take(squares, order, axis)
        ql, qr = (new, qr) if axis == 0 else (ql, new)
  return steps, renewed, stayed


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("tolerance", [None, 0.12])
def test_soap_is_its_authors_algorithm(cut, tolerance):
  options = dict(b1=0.9, b2=0.8, eps=1e-3, factor_decay=0.9, max_factor=3 if cut else None)
  how = optim.Decomposition("qr", tolerance)
  tx = optim.scale_by_soap(basis_period=4, decomposition=how, **options)
  gradients, found, _ = kernels(tx, "two")  # [4, 3]
  both = dict(period=4, decay=0.9, cut=cut, tolerance=tolerance)
  wanted, renewed, stayed = authors_soap(gradients, 0.9, 0.8, 1e-3, **both)
  np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)
  assert renewed >= 2 and bool(stayed) == (tolerance is not None)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("corrected", [False, True])
def test_shampoo(corrected, cut):
  """With the side of four rows cut, its factor is the diagonal of V V^T."""
  options = dict(b2=0.8, eps=1e-3, factor_decay=0.9, basis_period=4, max_factor=3 if cut else None)
  options |= {} if corrected else dict(power=0.25, ridge=1e-3)
  tx = optim.scale_by_shampoo(corrected=corrected, **options)
  gradients, found, _ = kernels(tx, "two")
  left, right, squares = np.zeros((4, 4)), np.zeros((3, 3)), np.zeros((4, 3))
  basis = None
  for t, g in enumerate(gradients):
    if t and not corrected:
      roots = []
      for values, q in basis:
        roots.append(q * (values + 1e-3 * values.max()) ** -0.25 @ q.T)
      step = roots[0] @ g @ roots[1]
    elif t:
      (_, ql), (_, qr) = basis
      squares = 0.8 * squares + 0.2 * (ql.T @ g @ qr) ** 2
      step = ql @ (ql.T @ g @ qr / (np.sqrt(squares / (1 - 0.8**t)) + 1e-3)) @ qr.T
    else:
      step = np.zeros_like(g)
    np.testing.assert_allclose(found[t], step, rtol=2e-3, atol=2e-4, err_msg=str(t))
    weight = 0.1 / (1 - 0.9 ** (t + 1))
    left = (1 - weight) * left + weight * g @ g.T
    right = (1 - weight) * right + weight * g.T @ g
    if t % 4 == 0:
      old = basis
      basis = [(np.diag(left), np.eye(4)) if cut else np.linalg.eigh(left), np.linalg.eigh(right)]
      if t:
        turns = [new.T @ q for (_, new), (_, q) in zip(basis, old)]
        squares = turns[0] ** 2 @ squares @ turns[1].T ** 2


@pytest.mark.parametrize("name", ["soap", "shampoo"])
def test_the_first_update_is_zero_without_decay_too(name):
  """As in the code of SOAP's authors; grafted, decay alone would be the direction of a whole step."""
  params = {"kernel": jnp.ones((4, 3)), "bias": jnp.ones(3)}
  grads = jax.tree.map(lambda x: 0.1 * x, params)
  make = getattr(optim, name)
  tx = optim.graft(optim.adam(0.1), make(1.0, weight_decay=0.5))
  state = tx.init(params)
  updates, state = tx.update(grads, state, params)
  assert not any(np.any(x) for x in jax.tree.leaves(updates))
  alone = make(1.0, weight_decay=0.5)
  zeros, steps, own = jax.tree.map(jnp.zeros_like, params), [], alone.init(params)
  for _ in range(2):
    step, own = alone.update(zeros, own, params)
    steps.append(step["kernel"])
  np.testing.assert_allclose(steps, [np.zeros((4, 3)), np.full((4, 3), -0.5)], rtol=1e-6)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_first_gradient_does_not_wait_for_a_basis(stacked):
  """Layers behind a head that starts at zero: L^-1/4 V R^-1/4 of one gradient is orthogonal."""
  gradient = np.random.default_rng(0).normal(size=(2, 4, 3)).astype(np.float32)
  gradient = {"w": gradient if stacked else gradient[0]}
  matrices = optim.Matrices(axes=lambda path, shape: optim.Axes((0,), (1,), (2,)))
  options = dict(matrices=matrices) if stacked else {}
  tx = optim.scale_by_shampoo(ridge=0.0, basis_period=50, factor_decay=0.5, **options)
  state, step = tx.init(gradient), jax.jit(tx.update)
  for size in (0.0, 0.0, 0.0, 1.0):
    found, state = step({"w": size * gradient["w"]}, state)
    assert not found["w"].any()
  found, after = step(gradient, state)
  u, _, v = np.linalg.svd(gradient["w"].astype(np.float64), full_matrices=False)
  # The average of three zeros and V V^T, and its square root: 15/8 = 1 + 1/2 + 1/4 + 1/8.
  np.testing.assert_allclose(found["w"], u @ v * (15 / 8) ** 0.5, rtol=1e-3, atol=1e-4)
  same = lambda a, b: bool(jax.tree.all(jax.tree.map(lambda x, y: (x == y).all(), a, b)))
  assert same(after.basis, state.basis)
  # The average of V V^T was 8/15 of it and becomes (32 square + 24) / 63: fourfold above 3.45.
  for square, renewed in ((3.3, False), (3.6, True)):
    _, last = step({"w": square**0.5 * gradient["w"]}, after)
    assert same(last.basis, after.basis) != renewed


def test_the_momentum_of_shampoo_does_not_count_its_first_update():
  """Of a constant gradient the average of the steps is that of their weights, which sum to 1."""
  params = {"kernel": jnp.ones((4, 3))}
  gradient = {"kernel": jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)}
  alone, tx = optim.scale_by_shampoo(), optim.shampoo(1.0, momentum=0.9, weight_decay=0.0)
  states, plain = [alone.init(params), tx.init(params)], []
  for _ in range(6):
    step, states[0] = alone.update(gradient, states[0], params)
    plain.append(np.float64(step["kernel"]))
    found, states[1] = tx.update(gradient, states[1], params)
    weights = 0.9 ** np.arange(len(plain) - 1)[::-1] if len(plain) > 1 else np.ones(0)
    wanted = np.einsum("n,nij->ij", weights, plain[1:]) / weights.sum() if len(plain) > 1 else 0.0
    np.testing.assert_allclose(found["kernel"], -wanted, rtol=1e-4, atol=1e-6)
