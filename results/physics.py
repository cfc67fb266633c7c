"""The table of equations solved by nets."""

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


def _columns() -> dict[str, Column]:
  columns = {}
  for i, (data, name) in enumerate({"poisson_2d": "Poisson", "heat_1d": "heat"}.items()):
    where, blanks = {"data": data}, " " * i  # blanks tell equal names apart
    columns[f"{name}: relative L2"] = Column(_ERROR, where, "lowest")
    columns[f"largest of three{blanks}"] = Column(_WORST, where)
    columns[f"seconds to 1e-3{blanks}"] = Column("{time to relative_l2 1e-03 median [s]}", where)
    columns[f"to 1e-5{blanks}"] = Column("{time to relative_l2 1e-05 median [s]}", where)
  return columns


TABLES = {
  "physics": Table(
    file="physics",
    where={"seed": "0 1 2"},
    lines={name: {"optimizer": name} for name in _OPTIMIZERS},
    columns=_columns(),
    corner="20 s of training",
  )
}
