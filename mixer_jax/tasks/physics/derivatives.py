"""Derivatives that residuals need, of functions of a point. JAX's own may be used, too."""

from typing import Callable

import jax
from jax.experimental import jet
import jax.numpy as jnp
import numpy as np

Function = Callable[[jax.Array], jax.Array]


def partial(f: Function, *axes: int) -> Function:
  """The partial derivative along these axes in turn: `partial(u, 0, 1)` is u_xy.

  Args:
    f: maps a point [dim] to [] or [k].
    *axes: numbers of axes.

  Returns:
    A function as f.

  Example:
    ```python
    import jax.numpy as jnp
    from mixer_jax.tasks import physics

    mixed = physics.partial(lambda x: x[0] * x[1] ** 2, 0, 1)
    assert mixed(jnp.array([1.0, 3.0])) == 6.0
    ```
  """
  for axis in axes:
    f = lambda x, f=f, axis=axis: jax.jvp(f, (x,), (_unit(x, axis),))[1]
  return f


def _unit(x: jax.Array, axis: int) -> jax.Array:
  return jnp.asarray(np.eye(x.size)[axis], x.dtype)


def powers(f: Function, x: jax.Array, axis: int, order: int) -> list[jax.Array]:
  """f and its derivatives along an axis up to an order, [order + 1], in one pass.

  A Taylor series is carried through the function (Bettencourt et al., 2019, Taylor-Mode Automatic
  Differentiation for Higher-Order Derivatives in JAX), so the work grows as the order squared.

  Args:
    f: maps a point [dim] to [] or [k], without operations that `jax.experimental.jet` lacks.
    x: the point, [dim].
    axis: number of the axis.
    order: of the last derivative.

  Example:
    ```python
    import jax.numpy as jnp
    from mixer_jax.tasks import physics

    u, u_x, u_xx = physics.powers(lambda x: jnp.exp(x[0]), jnp.array([0.0]), axis=0, order=2)
    assert abs(u - u_xx) < 1e-6
    ```
  """
  series = [_unit(x, axis), *(jnp.zeros_like(x) for _ in range(order - 1))]
  value, found = jet.jet(f, (x,), (series,))
  return [value, *found]


def laplacian(f: Function, x: jax.Array, axes: int | None = None) -> jax.Array:
  """The sum of second derivatives at a point, [] or [k].

  Args:
    f: maps a point [dim] to [] or [k].
    x: the point, [dim].
    axes: how many of the first axes count; None: all.

  Example:
    ```python
    import jax.numpy as jnp
    from mixer_jax.tasks import physics

    assert physics.laplacian(lambda x: jnp.sum(x**2), jnp.ones(3)) == 6.0
    ```
  """

  def second(e):
    return jax.jvp(lambda y: jax.jvp(f, (y,), (e,))[1], (x,), (e,))[1]

  return jax.vmap(second)(jnp.eye(x.size, dtype=x.dtype)[:axes]).sum(0)


def gradient(f: Function, x: jax.Array, axes: int | None = None) -> jax.Array:
  """The first derivatives at a point, [axes] or [axes, k].

  Args:
    f: maps a point [dim] to [] or [k].
    x: the point, [dim].
    axes: how many of the first axes count; None: all.

  Example:
    ```python
    import jax.numpy as jnp
    from mixer_jax.tasks import physics

    slope = physics.gradient(lambda x: x[0] * x[1], jnp.array([2.0, 3.0]))
    assert slope.tolist() == [3.0, 2.0]
    ```
  """
  slope = lambda e: jax.jvp(f, (x,), (e,))[1]
  return jax.vmap(slope)(jnp.eye(x.size, dtype=x.dtype)[:axes])
