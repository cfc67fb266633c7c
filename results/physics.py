"""The tables of equations solved by nets, and of the Gauss-Newton updates that solve them."""

from results.markdown import Column, Table

_ERROR, _WORST = "{test relative_l2 median}", "{test relative_l2 largest}"
_OPTIMIZERS = (
  "Adam",
  "Muon",
  "SOAP",
  "Adam in K-FAC's basis",
  "L-BFGS",
  "K-FAC, quadratic model",
  "Hessian-free",
  "Gauss-Newton",
  "Gauss-Newton, momentum",
  "self-scaled Broyden",
)


# Not run on larger nets.
_SMALL_ALONE = ("Muon", "Adam in K-FAC's basis", "Hessian-free")
_PEERS = (
  "DeepXDE: Adam",
  "DeepXDE: Adam, then L-BFGS (PyTorch)",
  "jinns: natural gradient",
  "jinns: self-scaled Broyden",
  "Adam, then L-BFGS",
  "self-scaled Broyden",
  "Gauss-Newton, momentum",
)


def _columns() -> dict[str, Column]:
  columns = {}
  for i, (data, name) in enumerate({"poisson_2d": "Poisson", "heat_1d": "heat"}.items()):
    where, blanks = {"data": data}, " " * i  # blanks tell equal names apart
    columns[f"{name}: relative L2"] = Column(_ERROR, where, "lowest")
    columns[f"largest of three{blanks}"] = Column(_WORST, where)
    columns[f"seconds to 1e-3{blanks}"] = Column("{time to relative_l2 1e-03 median [s]}", where)
    columns[f"to 1e-5{blanks}"] = Column("{time to relative_l2 1e-05 median [s]}", where)
  return columns


def _gauss_newton() -> Table:
  sizes = [(w, 512, 2) for w in (32, 128, 512)] + [(128, n, 2) for n in (128, 2048)]
  sizes += [(128, 512, n) for n in (5, 10)]
  named = lambda *size: dict(zip(("width", "points", "dimension"), map(str, size)))
  columns = {}
  for i, name in enumerate(("from layers", "explicit Jacobian")):
    where = {"optimizer": name}
    columns[f"{name}: seconds"] = Column("{seconds of an update median}", where)
    columns["MiB" + " " * i] = Column("{temporaries [MiB]}", where)
  return Table(
    file="gauss_newton",
    lines={f"{w}, {n:,}, {d}": named(w, n, d) for w, n, d in sizes},
    columns=columns,
    corner="width, points, dimension",
  )


TABLES = {
  "gauss_newton": _gauss_newton(),
  "physics": Table(
    file="physics",
    where={"seed": "0 1 2"},
    lines={name: {"optimizer": name} for name in _OPTIMIZERS},
    columns=_columns(),
    corner="20 s of training",
  ),
  "physics_larger": Table(
    file="physics",
    where={"budget": "60s", "seed": "0"},
    lines={name: {"optimizer": name} for name in _OPTIMIZERS if name not in _SMALL_ALONE},
    columns={
      name: Column("{test relative_l2:.1e}", {"data": data}, "lowest")
      for data, name in {
        "poisson_2d_deep": "Poisson, 9,873 parameters",
        "poisson_5d": "Poisson in 5 dimensions",
        "burgers": "Burgers",
        "korteweg_de_vries": "Korteweg-de Vries",
      }.items()
    },
    corner="relative L2 after 60 s, one seed",
  ),
  "physics_peers": Table(
    file="physics_peers",
    lines={name: {"optimizer": name} for name in _PEERS},
    columns={
      name: Column("{relative L2 error}", {"data": data}, "lowest")
      for data, name in {"poisson": "Poisson", "burgers": "Burgers"}.items()
    },
    corner="40 s of training, 2-64-1",
  ),
}
