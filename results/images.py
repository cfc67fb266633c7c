"""Tables of recipes for images, and of K-FAC's settings."""

from results.markdown import Column, Table

_TOP1 = "{test top-1 [%]}"


def _recipes() -> Table:
  accuracy = "{test top-1 mean [%]} ± {test top-1 deviation [%]}"
  last = {"budget": "100 epochs"}
  epochs = {"after 30 epochs": "30", "60": "60", "100": "100"}
  return Table(
    file="recipes",
    where={"seed": "0 1 2"},
    lines={
      "old-fashioned: padded crops and flips": {"recipe": "old-fashioned"},
      "`deit`, milder": {"recipe": "DeiT, milder"},
      "DINO, then the same": {"recipe": "DINO, then DeiT, milder"},
      "`deit` with the teacher, hard": {"recipe": "DeiT, milder, hard teacher"},
      "the same, soft": {"recipe": "DeiT, milder, soft teacher"},
    },
    columns={
      **{
        name: Column(accuracy, {"budget": f"{n} epochs"}, "highest") for name, n in epochs.items()
      },
      "test loss": Column("{test loss mean}", last, "lowest"),
      "training top-1": Column("{training top-1, last epoch [%]}", last),
      "seconds an epoch": Column("{epoch [s]}", last),
    },
    corner="test top-1 (%), three seeds",
  )


def _by_epoch(epochs: tuple[int, ...], where: dict, cell: str, name: str = "") -> dict:
  return {
    f"{name}{', ' if name else ''}{n}": Column(cell, {**where, "budget": f"{n} epochs"})
    for n in epochs
  }


def _transfer() -> Table:
  return Table(
    file="transfer",
    where={"model": "ResMLP of 0.85 million parameters"},
    lines={"from the donor": {"start": "Tiny-ImageNet"}, "from scratch": {"start": "scratch"}},
    columns={
      **_by_epoch((4, 8), {"data": "five flowers"}, _TOP1, "flowers"),
      **_by_epoch((4, 8), {"data": "Stanford Cars"}, _TOP1, "cars"),
    },
    corner="test top-1 (%) after epoch",
  )


def _transfer_quickstart() -> Table:
  return Table(
    file="transfer",
    where={"model": "quickstart", "data": "five flowers"},
    lines={
      "from the donor, all parameters trained": {"start": "CIFAR-10", "freeze": ""},
      "from scratch": {"start": "scratch"},
      "from the donor, `freeze=backbone`": {"start": "CIFAR-10", "freeze": "backbone"},
    },
    columns=_by_epoch((2, 4, 6, 8), {}, _TOP1),
    corner="test top-1 (%) on flowers after epoch",
  )


def _dino() -> Table:
  columns = {
    "untrained" if n == 0 else f"epoch {n}": {"budget": f"{n} epochs"} for n in range(0, 9, 2)
  }
  cell = "{k-NN test accuracy [%]}"
  return Table(
    file="dino",
    where={"data": "CIFAR-10, a JPEG edition", "optimizer": "AdamW"},
    lines={"Mixer of 0.28 million parameters": {"model": "Mixer of 0.28 million parameters"}},
    columns={name: Column(cell, where) for name, where in columns.items()},
    corner="k-NN, test (%)",
  )


def _camvid() -> Table:
  test, validation = "{test mean IoU [%]}", "{validation mean IoU [%]}"
  return Table(
    file="segmentation",
    where={"study": "camvid"},
    lines={
      "from the donor": {"start": "Tiny-ImageNet"},
      "from scratch (`configs/camvid.py`)": {"start": "scratch"},
    },
    columns={
      **_by_epoch((4, 8), {}, test, "test"),
      **_by_epoch((4, 8), {}, validation, "validation"),
    },
    corner="mean IoU (%) after epoch",
  )


def _damping() -> Table:
  cosine = "{cosine of the step to float64}"
  scales = (
    "8 of scales from 0.1 to 10",
    "8 of scales from 0.01 to 100",
    "8 of scales from 1e-4 to 1e4",
  )
  kinds = {"exact": ("1e-3",), "factored": ("1e-3", "1e-2")}
  return Table(
    file="kfac_settings",
    where={"study": "precision of damping"},
    lines={name: {"inputs": name} for name in (*scales, "256 raw pixels")},
    columns={
      f"{kind}, {damping}": Column(cosine, {"damping_type": kind, "damping": damping})
      for kind, dampings in kinds.items()
      for damping in dampings
    },
    corner="inputs",
  )


def _grid() -> Table:
  return Table(
    file="kfac_settings",
    where={"study": "grid of the defaults", "factor_decay": ""},
    lines={rate: {"learning_rate": rate} for rate in ("0.013", "0.039", "0.117")},
    columns={
      f"damping {value}": Column("{validation top-1 [%]}, {validation loss}", {"damping": value})
      for value in ("0.0033", "0.01", "0.03")
    },
    corner="rate",
  )


TABLES = {
  "recipes": _recipes(),
  "transfer": _transfer(),
  "transfer_quickstart": _transfer_quickstart(),
  "dino": _dino(),
  "camvid": _camvid(),
  "kfac_precision": _damping(),
  "kfac_grid": _grid(),
}
