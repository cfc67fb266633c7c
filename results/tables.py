"""The tables of the pages, by the names in their markers."""

from results.markdown import Column, Lead, Table

CELLS = {
  "CIFAR-10, `mini8`": {"data": "CIFAR-10", "model": "mini8"},
  "CIFAR-100, `mini8`": {"data": "CIFAR-100", "model": "mini8"},
  "CIFAR-10, `mini16`": {"data": "CIFAR-10", "model": "mini16"},
  "CIFAR-100, `mini16`": {"data": "CIFAR-100", "model": "mini16"},
}
OPTIMIZERS = (
  "SGD",
  "LAMB",
  "AdamW",
  "Muon",
  "Shampoo's directions, Adam's lengths",
  "SGD's lengths, K-FAC's directions",
  "K-FAC",
  "EK-FAC",
  "Shampoo, corrected",
  "SOAP",
  "Adam in K-FAC's basis",
  "Muon in K-FAC's metric",
)
BUDGETS = {
  "1x": "2400 AdamW steps",
  "2x": "4800 AdamW steps",
  "4x": "9600 AdamW steps",
}
_BEST = "highest"
_TOP1 = "{test top-1 mean [%]} ± {test top-1 deviation [%]}"


def _optimizers(*names: str) -> dict:
  return {name: {"optimizer": name} for name in names}


def _equal_time(
  budget: str, optimizers: tuple[str, ...] = OPTIMIZERS, cell: str = _TOP1, corner: str = ""
) -> Table:
  return Table(
    file="equal_time",
    where={"study": "frontier", "tuned at": "1x", "budget": BUDGETS[budget]},
    lines=_optimizers(*optimizers),
    columns={name: Column(cell, where, _BEST) for name, where in CELLS.items()},
    corner=corner
    or {"1x": "after the time of 2,400 steps of AdamW"}.get(budget, f"after {budget} that time"),
  )


def _leads(budget: str) -> Table:
  """What the second-order optimizers have more than Muon."""
  lead = lambda where: Lead("test top-1", "%", {"optimizer": "Muon"}, where)
  return Table(
    file="equal_time",
    where={"study": "frontier", "tuned at": "1x", "budget": BUDGETS[budget]},
    lines=_optimizers("K-FAC", *OPTIMIZERS[8:]),
    columns={cell: lead(where) for cell, where in CELLS.items()},
    corner=f"points above Muon, {budget}",
  )


TABLES = {f"equal_time_{budget}": _equal_time(budget) for budget in BUDGETS}
TABLES |= {f"leads_{budget}": _leads(budget) for budget in BUDGETS}
TABLES["readme"] = _equal_time(
  "1x", (*OPTIMIZERS[2:4], "K-FAC", *OPTIMIZERS[8:]), "{test top-1 mean [%]:.1f}", "optimizer"
)
