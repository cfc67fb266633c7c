"""Tables of operators."""

from results.markdown import Column, Table
from results.speed import KFAC_ADAM

_ERROR = "{test relative L2}"
_WORST = "{largest test relative L2 of a function}"


def _operators() -> Table:
  attention = [(f"{name} attention", "galerkin_1d", name) for name in ("Fourier", "softmax")]
  attention += [("linear attention", "galerkin_1d", "linear")]
  mlps = [(f"`{m}_operator`", f"{m}_operator", "") for m in ("mixer", "gmlp", "resmlp")]
  return Table(
    file="operators",
    where={"budget": "100 epochs"},
    lines={n: {"model": model, "attention": kind} for n, model, kind in attention + mlps},
    columns={
      f"{KFAC_ADAM}: relative L2": Column(_ERROR, {"optimizer": KFAC_ADAM}, "lowest"),
      "worst function": Column(_WORST, {"optimizer": KFAC_ADAM}, "lowest"),
      "Adam: relative L2": Column(_ERROR, {"optimizer": "Adam"}, "lowest"),
      "worst function ": Column(_WORST, {"optimizer": "Adam"}, "lowest"),
    },
    corner="operator, 100 epochs",
  )


def _darcy() -> Table:
  fno, galerkin = {"model": "fno_2d"}, {"model": "galerkin_2d"}
  long, short = {"budget": "100 epochs"}, {"budget": "20 epochs"}
  kfac = {"optimizer": KFAC_ADAM, "factors from": "the batch"}
  quarter = {"optimizer": KFAC_ADAM, "factors from": "a quarter"}
  adam = {"optimizer": "Adam"}
  return Table(
    file="darcy",
    where={"device": "one core of an Intel Xeon beside other work"},
    lines={
      f"`fno_2d`, 100 epochs, {KFAC_ADAM} (factors from a quarter)": {**fno, **long, **quarter},
      "`fno_2d`, 100 epochs, Adam": {**fno, **long, **adam},
      f"`fno_2d`, 20 epochs, {KFAC_ADAM}": {**fno, **short, **kfac},
      "the same, factors from a quarter": {**fno, **short, **quarter},
      "`fno_2d`, 20 epochs, Adam": {**fno, **short, **adam},
      "`fno_2d`, 28 epochs, Adam": {**fno, "budget": "28 epochs", **adam},
      f"`galerkin_2d`, 100 epochs, {KFAC_ADAM} (a quarter)": {**galerkin, **long, **quarter},
      f"`galerkin_2d`, 20 epochs, {KFAC_ADAM}": {**galerkin, **short, **kfac},
      "`galerkin_2d`, 20 epochs, Adam": {**galerkin, **short, **adam},
    },
    columns={
      "relative L2": Column(_ERROR, best="lowest"),
      "worst function": Column(_WORST, best="lowest"),
      "seconds an epoch": Column("{epoch [s]}"),
    },
    corner="Darcy flow, 85x85 points",
  )


def _inverse() -> Table:
  columns = {}
  for noise in ("0", "0.01", "0.1"):
    columns[f"noise {noise}: relative L2"] = Column(_ERROR, {"noise": noise})
    columns["worst function" + " " * len(columns)] = Column(_WORST, {"noise": noise})
  return Table(
    file="darcy_inverse",
    lines={
      "85x85 points, 29x29 cells, 12 epochs": {"points": "85x85"},
      "43x43 points, 15x15 cells, 20 epochs": {"points": "43x43"},
    },
    columns=columns,
    corner="coefficients from pressures",
  )


def _uses() -> Table:
  reverse, forward = "forward over reverse", "forward over forward"
  hidden = {"model": "tanh net 2-16-16-1", "layer": "1"}
  first = {"model": "tanh net 2-16-16-1", "layer": "0"}
  ways = {
    "rows of all uses stacked": "pooled",
    "sum over uses of $A \\otimes G$": "sum",
    "product nearest to that sum": "of sum",
    "nearest product": "best",
  }
  return Table(
    file="uses",
    lines={
      f"{name} layer, {how}": {**layer, "derivative": how}
      for name, layer in (("first", first), ("hidden", hidden))
      for how in (reverse, forward)
    },
    columns={
      name: Column("{cosine with the exact block mean:.2f}", {"optimizer": way})
      for name, way in ways.items()
    },
    corner="net 2-16-16-1",
  )


def _other_models() -> Table:
  packages = {
    "equimo": "vit mlla convnext",
    "flowjax": "coupling autoregressive block_neural",
    "brax": "ppo critic",
    "penzai": "gemma",
    "gemma": "3",
    "jraph": "network convolution",
    "e3nn": "points",
    "linen": "attention recurrent convolutional_lstm",
    "nnx": "attention recurrent",
    "haiku": "resnet recurrent",
    "distrax": "flow",
  }
  names = [f"{package}_{name}" for package, own in packages.items() for name in own.split()]
  return Table(
    file="other_models",
    lines={f"`{name}`": {"model": name} for name in names},
    columns={
      "arrays": Column("{arrays of parameters}"),
      "layers": Column("{layers}"),
      "parameters in layers [%]": Column("{parameters in layers [%]:.1f}"),
      "error of gradients": Column("{largest error of a layer's gradient}"),
      "loss": Column("{training loss first:.2f}"),
      "after 10 steps": Column("{training loss last:.2f}"),
    },
    corner="model",
  )


TABLES = {
  "uses": _uses(),
  "other_models": _other_models(),
  "operators": _operators(),
  "darcy": _darcy(),
  "darcy_inverse": _inverse(),
}
