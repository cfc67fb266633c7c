"""Tables of plans for devices, and of products with fewer bits."""

from results.markdown import Column, Table
from results.rows import read
from results.speed import models


def _devices() -> Table:
  """Every config for some devices, each with its memory, messages and the least time of a step."""
  columns = {}
  for spec in ("h100", "h100:8", "v5e:2x4"):
    where = {"devices": spec}
    columns[f"`{spec}`: GiB"] = Column("{memory [GiB]:.4g}", where)
    if ":" in spec:
      columns[f"`{spec}`: collectives (MB)"] = Column(
        "{collectives [number]} ({collectives [MB]:.4g})", where
      )
    columns[f"`{spec}`: ms"] = Column("{least step [ms]:.4g}", where)
    columns[f"`{spec}`: compiled in s"] = Column("{compiled [s]:.0f}", where)
  first = {"batch": Column("{batch}", {"devices": "h100"})}
  return Table(file="devices", lines=models("devices"), columns=first | columns, corner="config")


def _devices_mixers() -> Table:
  lines = dict.fromkeys((r["model"], r["optimizer"], r["devices"]) for r in read("devices_mixers"))
  return Table(
    file="devices_mixers",
    lines={
      f"`{m}`, {o}, `{spec}`": {"model": m, "optimizer": o, "devices": spec} for m, o, spec in lines
    },
    columns={
      "GiB": Column("{memory [GiB]:.4g}"),
      "gradient (MB)": Column("{plain collectives [MB]}"),
      "model": Column("{gradient [MB]}"),
      "factors": Column("{factors collectives [MB]}"),
      "model ": Column("{factors [MB]}"),
      "inverses": Column("{inverses collectives [MB]}"),
      "model  ": Column("{inverses [MB]}"),
      "least step (ms)": Column("{least step [ms]:.4g}"),
      "compiled (s)": Column("{compiled [s]:.0f}"),
    },
    corner="Mixer",
  )


def _plan_truth() -> Table:
  return Table(
    file="plan_truth",
    lines=models("plan_truth"),
    columns={
      "arguments, planned (MiB)": Column("{arguments planned [MiB]}"),
      "held": Column("{arguments held [MiB]}"),
      "temporaries, planned (MiB)": Column("{temporaries planned [MiB]}"),
      "taken": Column("{temporaries taken [MiB]}"),
      "GFLOP, planned": Column("{operations planned [GFLOP]}"),
      "counted": Column("{operations counted [GFLOP]}"),
    },
    corner="config",
  )


def _precision() -> Table:
  """The error of a step by the precision of its products."""
  lines = dict.fromkeys((r["kind"], r["linear_algebra"], r["products"]) for r in read("precision"))
  return Table(
    file="precision",
    lines={
      f"{kind}, {by}: {what}": {"kind": kind, "linear_algebra": by, "products": what}
      for kind, by, what in lines
    },
    columns={
      c: Column("{relative error}", {"condition": c}) for c in ("1e1", "1e2", "1e3", "1e4", "1e5")
    },
    corner="condition of the factors",
  )


TABLES = {
  "devices": _devices(),
  "devices_mixers": _devices_mixers(),
  "plan_truth": _plan_truth(),
  "precision": _precision(),
}
