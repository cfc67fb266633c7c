"""Tables of text and translation."""

from results.markdown import Column, Table
from results.speed import KFAC_ADAM, KFAC_MUON

FAMILY = ("AdamW", "Muon", "EK-FAC", KFAC_ADAM, KFAC_MUON)


def _pair(name: str, unit: str = "") -> str:
  return f"{{{name} mean{unit}}} ± {{{name} deviation{unit}}}"


def _gates() -> Table:
  words = _pair("WikiText-2 validation perplexity")
  lengths = {"after 1,000 steps": "1000", "2,000": "2000", "3,000": "3000"}
  columns = {
    name: Column(words, {"budget": f"{steps} steps"}, "lowest") for name, steps in lengths.items()
  }
  reviews = Column(_pair("IMDB validation perplexity"), {"budget": "3000 steps"}, "lowest")
  gates = ("linear", "additive", "multiplicative", "multiplicative, split")
  return Table(
    file="gates",
    where={"seed": "0 1 2"},
    lines={gate: {"gate": gate} for gate in gates},
    columns={**columns, "reviews, 3,000": reviews},
    corner="gate",
  )


def _sst2() -> Table:
  def line(model, start="scratch"):
    return {"model": model, "start": start, "seed": "0 1 2"}

  frozen = "frozen outputs of our language model"
  return Table(
    file="sst2",
    where={"study": "sst2"},
    lines={
      **{f"{name} from scratch": line(name) for name in ("gMLP", "tMLP", "aMLP")},
      "gMLP after our language model": line("gMLP", "our language model"),
      "gMLP on frozen outputs": line("gMLP", f"{frozen} with multiplicative gates"),
      "tMLP on frozen outputs": line("tMLP", frozen),
      "aMLP on frozen outputs": line("aMLP", frozen),
    },
    columns={
      "dev (%)": Column(_pair("dev accuracy", " [%]"), best="highest"),
      "test (%)": Column(_pair("test accuracy", " [%]"), best="highest"),
      "training, last epoch (%)": Column("{training accuracy, last epoch [%]}"),
    },
  )


def _sick() -> Table:
  parts = {"SICK, test": "test", "MNLI, matched": "MNLI matched", "mismatched": "MNLI mismatched"}
  return Table(
    file="sick",
    lines={
      "gMLP": {"model": "gMLP", "start": "scratch"},
      "tMLP (Toeplitz)": {"model": "tMLP", "start": "scratch"},
      "aMLP (tiny attention)": {"model": "aMLP", "start": "scratch"},
      "gMLP after our language model": {"start": "our language model"},
      "aMLP on its frozen outputs": {"start": "frozen outputs of our language model"},
    },
    columns={
      f"{name} (%)": Column(_pair(f"{part} accuracy", " [%]"), best="highest")
      for name, part in parts.items()
    },
  )


def _sentiment() -> Table:
  return Table(
    file="sst2_optimizers",
    where={"seed": "0 1 2"},
    lines={name: {"optimizer": name} for name in FAMILY},
    columns={
      "rate": Column("{learning_rate}"),
      "test accuracy (%)": Column(_pair("test accuracy", " [%]"), best="highest"),
      "lowest test loss": Column("{test loss, lowest}", best="lowest"),
      "last": Column("{test loss}", best="lowest"),
      "training loss": Column("{training loss}", best="lowest"),
      "seconds an epoch": Column("{epoch [s]}"),
    },
    corner="sentiment, 3 epochs",
  )


def _masked_words() -> Table:
  return Table(
    file="mlm_optimizers",
    where={"seed": "0 1 2"},
    lines={name: {"optimizer": name} for name in FAMILY},
    columns={
      "rate": Column("{learning_rate}"),
      "test perplexity": Column(_pair("test perplexity"), best="lowest"),
      "training loss": Column("{training loss}", best="lowest"),
      "epochs to AdamW's last perplexity": Column("{epochs to AdamW's test perplexity}"),
      "seconds": Column("{time to AdamW's test perplexity [s]}"),
      "seconds an epoch": Column("{epoch [s]}"),
    },
    corner="masked words, 10 epochs",
  )


def _masked_rates() -> Table:
  names = ("AdamW", "Muon", KFAC_ADAM, KFAC_MUON)
  return Table(
    file="mlm_optimizers",
    where={"seed": "0"},
    lines={rate: {"learning_rate": rate} for rate in ("0.0059", "0.012", "0.024")},
    columns={name: Column("{dev perplexity}", {"optimizer": name}, "lowest") for name in names},
    corner="rate",
  )


_RESMLP, _TRANSFORMER = "resmlp_translate_small", "transformer_translate_small"


def _translation() -> Table:
  last, mean = {"checkpoint": "last"}, {"checkpoint": "mean of five"}
  bleu = _pair("test BLEU")
  return Table(
    file="multi30k",
    where={"budget": "35 minutes", "seed": "0 1 2"},
    lines={
      f"`{_RESMLP}`": {"model": _RESMLP, "learning_rate": "4e-3"},
      f"`{_TRANSFORMER}`": {"model": _TRANSFORMER, "learning_rate": "2e-3"},
    },
    columns={
      "rate": Column("{learning_rate}"),
      "test BLEU": Column(bleu, last, "highest"),
      "mean of five checkpoints": Column(bleu, mean, "highest"),
    },
    corner="after 35 minutes, three seeds",
  )


def _translation_rates() -> Table:
  tries = {
    "1e-3": {"learning_rate": "1e-3"},
    "2e-3": {"learning_rate": "2e-3", "optimizer": "Adam", "blocks": ""},
    "4e-3": {"learning_rate": "4e-3"},
    "2e-3, four blocks": {"learning_rate": "2e-3", "blocks": "4"},
    f"2e-3, {KFAC_ADAM}": {"learning_rate": "2e-3", "optimizer": KFAC_ADAM},
  }
  return Table(
    file="multi30k",
    where={"budget": "10 minutes"},
    lines={"ResMLP": {"model": _RESMLP}, "Transformer": {"model": _TRANSFORMER}},
    columns={name: Column("{validation BLEU} ({steps})", try_) for name, try_ in tries.items()},
    corner="validation BLEU (steps) by rate",
  )


TABLES = {
  "gates": _gates(),
  "sst2": _sst2(),
  "sick": _sick(),
  "sentiment": _sentiment(),
  "masked_words": _masked_words(),
  "masked_rates": _masked_rates(),
  "translation": _translation(),
  "translation_rates": _translation_rates(),
}
