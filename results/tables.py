"""The tables of the pages, by the names in their markers."""

from results import devices, images, operators, physics, speed, text
from results.markdown import Column, Lead, Leads, Table

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
_MUON = {"optimizer": "Muon"}
_BEST = "highest"
_TOP1 = "{test top-1 mean [%]} ± {test top-1 deviation [%]}"


def _optimizers(*names: str) -> dict:
  return {name: {"optimizer": name} for name in names}


def _equal_time(
  budget: str, optimizers: tuple[str, ...] = OPTIMIZERS, cell: str = _TOP1, corner: str = ""
) -> Table:
  return Table(
    file="equal_time normuon",
    where={"study": ("frontier", "normuon"), "tuned at": "1x", "budget": BUDGETS[budget]},
    lines=_optimizers(*optimizers),
    columns={name: Column(cell, where, _BEST) for name, where in CELLS.items()},
    corner=corner
    or {"1x": "after the time of 2,400 steps of AdamW"}.get(budget, f"after {budget} that time"),
  )


def _leads(budget: str, tuned_at: str = "1x", optimizers: tuple[str, ...] = ()) -> Table:
  """What the second-order optimizers have more than Muon."""
  return Table(
    file="equal_time",
    where={"study": "frontier", "tuned at": tuned_at, "budget": BUDGETS[budget]},
    lines=_optimizers(*optimizers or ("K-FAC", *OPTIMIZERS[8:])),
    columns={cell: Lead("test top-1", "%", _MUON, where) for cell, where in CELLS.items()},
    corner=f"points above Muon, {budget}",
  )


def _all_leads() -> Table:
  """Leads over Muon, lowest and highest of the four cells, in each budget."""
  lead = Lead("test top-1", "%", _MUON)
  of = {budget: {"tuned at": "1x", "budget": length} for budget, length in BUDGETS.items()}
  of["4x, settings chosen there"] = {"tuned at": "4x", "budget": BUDGETS["4x"]}
  columns = {name: Leads(lead, tuple(CELLS.values()), where) for name, where in of.items()}
  lines = _optimizers(*reversed(OPTIMIZERS[8:]))
  return Table("equal_time", lines, columns, "points above Muon", {"study": "frontier"})


def _batches() -> Table:
  """Muon and Muon in K-FAC's metric with batches of 64 and of 128."""
  metric = {"optimizer": "Muon in K-FAC's metric"}
  of = {
    "64": {"tuned at": "1x", "budget": BUDGETS["1x"]},
    "128": {"experiment": "128"},
  }
  columns = {}
  for batch, where in of.items():
    columns[f"Muon, {batch}"] = Column(_TOP1, {**where, **_MUON})
    columns[f"Muon in K-FAC's metric, {batch}"] = Column(_TOP1, {**where, **metric})
  for batch, where in of.items():
    columns[f"lead, {batch}"] = Lead("test top-1", "%", _MUON, {**where, **metric})
  return Table("equal_time equal_time_batches", CELLS, columns, "batches of 64 and 128")


def _normuon() -> Table:
  """Muon and Muon in K-FAC's metric, without and with NorMuon's normalisation."""
  ours = {"optimizer": "Muon in K-FAC's metric"}
  lines = {}
  for budget in ("1x", "4x"):
    at = {"batch": "64", "random_crop": "", "tuned at": budget, "budget": BUDGETS[budget]}
    lines |= {f"{cell}, {budget}": {**at, **where} for cell, where in CELLS.items()}
  at["tuned at"] = ""  # settings that were chosen elsewhere
  crops = {"random_crop": "true", "weight_decay": "0.15"}
  for cell, where in list(CELLS.items())[2:]:
    lines[f"{cell}, 4x, random crops"] = {**at, **where, **crops}
  for cell, where in CELLS.items():
    lines[f"{cell}, 4x, batches of 128"] = {**at, **where, "batch": "128"}
  columns = {
    name: Column("{test top-1 mean [%]}", {"optimizer": optimizer})
    for name, optimizer in {
      "Muon": "Muon",
      "NorMuon": "NorMuon",
      "Muon in K-FAC's metric": ours["optimizer"],
      "the same with `normuon`": "NorMuon in K-FAC's metric",
    }.items()
  }
  for name in ("Muon", "NorMuon"):
    columns[f"its lead over {name}"] = Lead("test top-1", "%", {"optimizer": name}, ours)
  return Table("equal_time normuon", lines, columns, "test top-1 (%)")


def _autoencoder() -> Table:
  columns = {}
  for data in ("sample", "CIFAR-10", "MNIST"):
    loss = Column("{training loss mean} in {training time [s]:.0f} s", {"data": data}, "lowest")
    columns[f"{data}: training loss"] = loss
    columns[f"{data}: sooner than Adam"] = Column("{sooner than Adam [x]} x", {"data": data})
  where = {"study": "autoencoder", "best batch": "yes"}
  lines = _optimizers("K-FAC", "Adam in K-FAC's basis", "Adam", "SGD")
  return Table("autoencoder", lines, columns, "optimizer, better batch", where)


def _step_cost() -> Table:
  """The frontier's optimizers in turns on a fixed batch, and kfac-jax's own."""
  on = {
    "`mini8`": ("mini8", "a5b51a9, 2026-11-27"),
    "`mini16`": ("mini16", "a5b51a9, 2026-11-27"),
    "`mini8`, Xeon": ("mini8", "e5f6a31"),
  }
  columns = {
    name: Column("{step [x SGD]}", {"model": model, "commit": commit})
    for name, (model, commit) in on.items()
  }
  memory = {"model": "mini8", "commit": on["`mini8`"][1]}
  columns["memory (MiB), `mini8`"] = Column("{memory [MiB]}", memory)
  names = [name for name in OPTIMIZERS if "lengths" not in name]
  lines = _optimizers(*names, "kfac_jax.Optimizer")
  return Table("costs", lines, columns, "time of a step, x SGD's", {"study": "costs"})


def _burgers() -> Table:
  columns = {}
  for name, model in {"Galerkin attention": "galerkin_1d", "FNO": "fno_1d"}.items():
    where = {"model": model, "budget": "100 epochs", "seed": ("0 1 2", "")}
    columns[name] = Column("{test relative L2 mean}", where, "lowest")
    columns[f"{name}, x Adam's"] = Column("{test relative L2 [x Adam]}", where)
    columns[f"{name}, x Adam's at 1e-3"] = Column("{test relative L2 [x Adam at 1e-3]}", where)
  lines = _optimizers("Adam", "K-FAC", "Adam in K-FAC's basis", "EK-FAC")
  return Table("burgers", lines, columns, "relative L2")


def _small() -> Table:
  columns = {}
  for model in ("mini8", "mini16"):
    columns[f"`{model}`: top-1"] = Column(_TOP1, {"model": model}, _BEST)
    columns[f"`{model}`: time, x SGD's"] = Column("{epoch [x SGD]}", {"model": model})
  return Table("small", _optimizers("SGD", "Adam", "K-FAC"), columns, "four epochs")


def _grafts() -> Table:
  """Pairs of one optimizer's lengths and another one's directions at equal epochs."""
  columns = {
    f"`{model}`: {name}": Column(_TOP1, {"model": model, "directions": name}, _BEST)
    for model in ("mini8", "mini16")
    for name in ("SGD", "K-FAC")
  }
  lines = {name: {"lengths": name} for name in ("SGD", "K-FAC")}
  return Table("small", lines, columns, "lengths of \\ directions of")


def _tuned() -> Table:
  equal_time = {"comparison": "equal time"}
  columns = {
    "top-1, three epochs": Column(_TOP1, {"comparison": ""}, _BEST),
    "time, x SGD's": Column("{epoch [x SGD]}"),
    "top-1, equal time": Column(_TOP1, equal_time, _BEST),
    "minutes": Column("{training time [min]}", equal_time),
  }
  return Table("tuned", _optimizers("SGD", "Adam", "K-FAC"), columns, "equally tuned")


TABLES = {f"equal_time_{budget}": _equal_time(budget) for budget in BUDGETS}
TABLES |= {f"leads_{budget}": _leads(budget) for budget in BUDGETS}
TABLES |= {
  "readme": _equal_time(
    "1x",
    ("AdamW", "Muon", "NorMuon", "K-FAC", *OPTIMIZERS[8:]),
    "{test top-1 mean [%]:.1f}",
    "optimizer",
  ),
  "leads": _all_leads(),
  "leads_4x_own": _leads("4x", "4x", OPTIMIZERS[-2:]),
  "batches": _batches(),
  "normuon": _normuon(),
  "autoencoder": _autoencoder(),
  "autoencoder_tenth": Table(
    file="autoencoder",
    where={"study": "autoencoder_tenth", "best batch": "yes"},
    lines=_optimizers("K-FAC", "Adam in K-FAC's basis", "Adam", "SGD"),
    columns={
      "batch": Column("{batch}"),
      "training loss": Column("{training loss mean}", best="lowest"),
      "test loss": Column("{test loss mean}", best="lowest"),
      "seconds": Column("{training time [s]}"),
    },
    corner="a tenth of the time",
  ),
  "quickstart": Table(
    file="quickstart",
    where={"tuned": "yes"},
    lines=_optimizers(*reversed(OPTIMIZERS[-2:]), "Muon", "K-FAC", "SGD", "Adam"),
    columns={
      "test top-1": Column(_TOP1, best=_BEST),
      "from, to": Column("{test top-1 lowest [%]}, {test top-1 highest [%]}"),
      "training loss": Column("{training loss mean}"),
      "time of a step, x SGD's": Column("{step [x SGD]}"),
    },
    corner="six seeds",
  ),
  "burgers": _burgers(),
  "step_cost": _step_cost(),
  "small": _small(),
  "grafts": _grafts(),
  "tuned": _tuned(),
  "fine_tuning": Table(
    file="fine_tuning",
    where={"data": "CIFAR-10 sample"},
    lines=_optimizers("K-FAC", "SGD"),
    columns={
      f"{start}: {when}": Column(f"{{{metric}}}", {"start": start})
      for start in ("pre-trained", "from scratch")
      for when, metric in (
        ("best top-1", "test best top-1 mean [%]"),
        ("after one epoch", "test top-1 after one epoch mean [%]"),
      )
    },
    corner="optimizer",
  ),
}
TABLES |= (
  devices.TABLES | images.TABLES | operators.TABLES | physics.TABLES | speed.TABLES | text.TABLES
)
