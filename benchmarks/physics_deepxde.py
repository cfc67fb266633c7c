"""DeepXDE on the problems of `physics_peers`, on its JAX and its PyTorch backend."""

from typing import Any

import deepxde as dde
import numpy as np

from benchmarks import physics_peers, physics_problems


def run(options: Any, record: Any, backend: str) -> None:
  if backend == "jax":
    import jax

    jax.config.update("jax_enable_x64", True)
  else:
    import torch

    torch.set_num_threads(1)
  dde.config.set_default_float("float64")
  problem = record.problem
  box = ([0, 0], [1, 1]) if problem.name == "poisson" else ([0, -1], [1, 1])
  sets = [dde.icbc.PointSetBC(problem.points[k], v) for k, v in problem.values.items()]
  data = dde.data.PDE(
    dde.geometry.Rectangle(*box), _equation(problem.name, backend), sets, anchors=_inside(problem)
  )
  net = dde.nn.FNN([2, *options.hidden, 1], "tanh", "Glorot uniform")
  model = dde.Model(data, net)
  _begin(model, physics_peers.layers_of(options), backend)
  watch = _watch(record)
  model.compile("adam", lr=physics_peers.ADAM_RATE, verbose=0)
  steps = 10**9 if backend == "jax" else options.adam_steps
  train = dict(display_every=10**9, callbacks=[watch], verbose=0)
  model.train(iterations=steps, **train)
  if backend == "jax" or watch.over:
    return
  dde.optimizers.set_LBFGS_options(maxiter=10**9, gtol=0)
  # Iterations between two calls of the callbacks; it has no function that sets them.
  share = dde.optimizers.config.LBFGS_options
  share.update(iter_per_step=100, fun_per_step=125)
  model.compile("L-BFGS", verbose=0)
  model.train(**train)


def _inside(problem: Any) -> np.ndarray:
  return problem.points["interior"]


def _equation(name: str, backend: str) -> Any:
  """The residual; the JAX backend gives derivatives as pairs of values and functions."""
  values = (lambda x: x[0]) if backend == "jax" else (lambda x: x)

  def poisson(x, y):
    sin = dde.backend.sin
    second = [values(dde.grad.hessian(y, x, i=i, j=i)) for i in range(2)]
    return sum(second) + 2 * np.pi**2 * sin(np.pi * x[:, :1]) * sin(np.pi * x[:, 1:])

  def burgers(x, y):
    first = [values(dde.grad.jacobian(y, x, i=0, j=j)) for j in range(2)]
    second = values(dde.grad.hessian(y, x, i=1, j=1))
    return first[0] + values(y) * first[1] - physics_problems.VISCOSITY * second

  return {"poisson": poisson, "burgers": burgers}[name]


def _begin(model: Any, layers: Any, backend: str) -> None:
  """Sets the first parameters."""
  if backend == "jax":
    named = {f"denses_{i}": dict(kernel=w, bias=b) for i, (w, b) in enumerate(layers)}
    model.net.params, model.params = {"params": named}, "given"
    return
  import torch

  for linear, (kernel, bias) in zip(model.net.linears, layers, strict=True):
    linear.weight.data, linear.bias.data = torch.tensor(kernel.T.copy()), torch.tensor(bias)


def _watch(record: Any) -> Any:
  class Watch(dde.callbacks.Callback):
    over = False

    def on_epoch_end(self):
      model = self.model
      if record.due():
        known = model.train_state
        loss = lambda: np.sum(model._outputs_losses(True, known.X_train, known.y_train, None)[1])
        self.over = model.stop_training = record.row(model.predict, loss)

  return Watch()
