"""Tables of times and memory."""

from results.markdown import Column, Table
from results.rows import read

KFAC_ADAM, KFAC_MUON = "Adam in K-FAC's basis", "Muon in K-FAC's metric"


def models(file: str) -> dict:
  """A line for each model of a file with a name of its own."""
  names = dict.fromkeys(row["model"] for row in read(file) if " " not in row["model"])
  return {f"`{name}`": {"model": name} for name in names}


def _peers() -> Table:
  s16, s4 = {"model": "mixer_s16"}, {"model": "mixer_s4"}
  return Table(
    file="peers",
    where={"run": ""},
    lines={
      "ours": {"by": "ours"},
      "plain Linen and optax": {"by": "plain Linen"},
      "timm, PyTorch": {"by": "timm"},
    },
    columns={
      "S/16, batch 16: forward": Column("{forward [x ours]}", s16),
      "step": Column("{step [x ours]}", s16),
      "S/4, batch 64: forward": Column("{forward [x ours]}", s4),
      "step ": Column("{step [x ours]}", s4),
    },
    corner="time, x ours",
  )


def _text_peers() -> Table:
  on = {"Intel Xeon": "two cores of an Intel Xeon", "AMD EPYC": "two cores of an AMD EPYC"}
  times = {f"{name}: seconds a step": Column("{step [s]}", {"device": on[name]}) for name in on}
  ratios = {f"{name}: x ours": Column("{step [x ours]}", {"device": on[name]}) for name in on}
  return Table(
    file="text_peers",
    where={"matrix over tokens": ""},
    lines={name: {"by": name} for name in ("ours", "PyTorch")},
    columns={name: column for pair in zip(times.items(), ratios.items()) for name, column in pair},
    corner="`gmlp_text_small`, masked words",
  )


def _translation_peers() -> Table:
  return Table(
    file="translation_peers",
    lines={
      "Transformer": {"model": "transformer_translate_small", "by": "ours"},
      "ResMLP": {"model": "resmlp_translate_small", "by": "ours"},
      "PyTorch's Transformer": {"by": "PyTorch"},
    },
    columns={
      "training step, s": Column("{step [s]}"),
      "x our Transformer": Column("{step [x our Transformer]}"),
      "greedy search, s": Column("{greedy search [s]}"),
      "x our Transformer ": Column("{greedy search [x our Transformer]}"),
    },
  )


def _operator_peers() -> Table:
  ours, theirs = {"by": "ours"}, {"by": "published code", "run": ""}
  lines = [("Galerkin", 512), ("Galerkin", 2048), ("Galerkin", 8192)]
  lines += [("Fourier", 512), ("Fourier", 2048)]
  return Table(
    file="operator_peers",
    lines={f"{a}, {n:,} points": {"attention": a, "points": str(n)} for a, n in lines},
    columns={
      "seconds a step": Column("{step [s]}", ours),
      "published code, x ours": Column("{step [x ours]}", theirs),
      "memory (MiB)": Column("{memory [MiB]:,}", ours),
    },
    corner="attention",
  )


_STEP = {
  "x SGD": Column("{step [x SGD]}"),
  "a plain step": Column("{plain step [x SGD]}"),
  "with factors": Column("{step with factors [x SGD]}"),
  "with a basis, too": Column("{step with basis [x SGD]}"),
  "memory (MiB)": Column("{memory [MiB]:,}"),
}


def _kfac_s4() -> Table:
  def line(name, sides, factors, damping="exact"):
    place = {"sides": sides, "factors from": factors}
    damping = {"damping type": damping} if name == "K-FAC" else {}
    return {"optimizer": name, **place, **damping}

  batch, quarter = "the batch", "a quarter"
  return Table(
    file="costs",
    where={"study": "costs", "model": "mixer_s4", "commit": "6d2c27e"},
    lines={
      "SGD": {"optimizer": "SGD"},
      "K-FAC": line("K-FAC", "2", batch),
      "K-FAC, factored damping": line("K-FAC", "2", batch, "factored"),
      "K-FAC, factors from a quarter": line("K-FAC", "2", quarter),
      "K-FAC, one side": line("K-FAC", "1", batch),
      "K-FAC, one side, a quarter": line("K-FAC", "1", quarter),
      KFAC_ADAM: line(KFAC_ADAM, "2", batch),
      f"{KFAC_ADAM}, one side, a quarter": line(KFAC_ADAM, "1", quarter),
    },
    columns=_STEP,
    corner="S/4, batch 64",
  )


def _compile() -> Table:
  one, scanned = {"blocks": "one by one"}, {"blocks": "scanned"}
  lines = [(m, o) for o in ("SGD", "K-FAC") for m in ("mixer_b16", "mixer_l16", "mixer_h14")]
  seconds, memory = "{compilation [s of the processor]}", "{memory [MiB]:,}"
  return Table(
    file="compile",
    where={"study": "compile", "commit": "0323cad"},
    lines={f"`{m}`, {o}": {"model": m, "optimizer": o} for m, o in lines},
    columns={
      "blocks": Column("{depth}", one),
      "one by one (s)": Column(seconds, one),
      "scanned (s)": Column(seconds, scanned),
      "ratio": Column("{compilation [x one by one]}", scanned),
      "one by one (MiB)": Column(memory, one),
      "scanned (MiB)": Column(memory, scanned),
    },
    corner="model",
  )


def _remat() -> Table:
  memory = "{temporaries [MiB]:,}"
  return Table(
    file="compile",
    where={"study": "memory of a gradient"},
    lines={"one by one": {"blocks": "one by one"}, "`scan_blocks`": {"blocks": "scanned"}},
    columns={
      "temporaries (MiB)": Column(memory, {"remat": "no"}),
      "with `remat`": Column(memory, {"remat": "yes"}),
    },
    corner="blocks",
  )


def _config_memory() -> Table:
  whole, remat = {"accum_steps": "", "remat": ""}, {"remat": "True"}
  return Table(
    file="config_memory",
    lines=models("config_memory"),
    columns={
      "batch": Column("{batch}", whole),
      "memory (MiB)": Column("{memory [MiB]:,}", whole),
      "with `remat` and `scan_blocks`": Column("{memory [MiB]:,}", remat),
      "examples/s": Column("{examples/s:,}", whole),
    },
    corner="config",
  )


def _zoo() -> Table:
  return Table(
    file="zoo",
    lines=models("zoo"),
    columns={
      "image": Column("{image}"),
      "parameters (M)": Column("{parameters [M]}"),
      "published": Column("{published parameters [M]}"),
      "multiply-adds (G)": Column("{multiply-adds [G]}"),
      "memory (MiB)": Column("{memory [MiB]:,}"),
      "images/s": Column("{images/s}"),
    },
    corner="name",
  )


def _kills() -> Table:
  family = ("SGD", "Adam", "K-FAC", "SGD's lengths, K-FAC's directions")
  names = ("kills", "runs", "kills before the first step", "kills between checkpoints")
  names += ("kills while a checkpoint was written",)
  return Table(
    file="kills",
    where={"study": "kills"},
    lines={name: {"optimizer": name} for name in family},
    columns={name.removeprefix("kills "): Column(f"{{{name}}}") for name in names},
    corner="optimizer",
  )


TABLES = {
  "peers": _peers(),
  "text_peers": _text_peers(),
  "translation_peers": _translation_peers(),
  "operator_peers": _operator_peers(),
  "kfac_s4": _kfac_s4(),
  "compile": _compile(),
  "remat": _remat(),
  "config_memory": _config_memory(),
  "zoo": _zoo(),
  "kills": _kills(),
}
