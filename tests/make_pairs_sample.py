"""Makes the bundled sample of a toy language pair, and its vocabulary.

  python -m tests.make_pairs_sample --out=DIR

A small grammar of English and German writes each sentence in both languages. Words, genders, cases,
the place of the verb and that of its prefix are as in German; the sentences mean little. The same
seed gives the same sample.
"""

import argparse
import lzma
import pathlib

import numpy as np

from mixer_jax.text.subwords import Subwords

SPLITS = {"train": 3000, "dev": 200, "test": 200}
# English singular and plural; German gender, singular and plural.
PEOPLE = """man men m Mann Männer, woman women f Frau Frauen, child children n Kind Kinder,
  girl girls n Mädchen Mädchen, teacher teachers m Lehrer Lehrer, friend friends m Freund Freunde,
  doctor doctors f Ärztin Ärztinnen, neighbour neighbours f Nachbarin Nachbarinnen"""
THINGS = """ball balls m Ball Bälle, book books n Buch Bücher, letter letters m Brief Briefe,
  picture pictures n Bild Bilder, bag bags f Tasche Taschen, apple apples m Apfel Äpfel,
  newspaper newspapers f Zeitung Zeitungen, bicycle bicycles n Fahrrad Fahrräder,
  guitar guitars f Gitarre Gitarren, hat hats m Hut Hüte, dog dogs m Hund Hunde,
  cat cats f Katze Katzen, horse horses n Pferd Pferde, bird birds m Vogel Vögel"""
ADJECTIVES = {
  PEOPLE: "old alt, young jung, small klein, tall groß, kind freundlich, cheerful fröhlich",
  THINGS: "old alt, small klein, big groß, black schwarz, brown braun, beautiful schön, cheap billig",
}
# English with "he", with "they"; German with "er", infinitive, and a prefix that goes to the end.
VERBS = """sees see sieht sehen -, buys buy kauft kaufen -, carries carry trägt tragen -,
  loves love liebt lieben -, finds find findet finden -, paints paint malt malen -,
  holds hold hält halten -, draws draw zeichnet zeichnen -, hides hide versteckt verstecken -,
  fetches fetch holt holen ab, watches watch schaut schauen an"""
PLACES = """in the park=im Park, on the street=auf der Straße, in the garden=im Garten,
  at the station=am Bahnhof, in the kitchen=in der Küche, in front of the house=vor dem Haus,
  on the beach=am Strand, in the city=in der Stadt"""
TIMES = "today=heute, tomorrow=morgen, now=jetzt, in the evening=am Abend"
ENDS = {  # of "ein", "d-", "dies", of adjectives after the first and after the others
  ("nom", "m"): ("", "er", "er", "er", "e"),
  ("acc", "m"): ("en", "en", "en", "en", "en"),
  ("nom", "f"): ("e", "ie", "e", "e", "e"),
  ("acc", "f"): ("e", "ie", "e", "e", "e"),
  ("nom", "n"): ("", "as", "es", "es", "e"),
  ("acc", "n"): ("", "as", "es", "es", "e"),
}
NUMBERS = {"two": "zwei", "three": "drei", "four": "vier"}


def _words(table, separator=None):
  return [entry.strip().split(separator) for entry in table.split(",")]


class Grammar:
  """Draws sentences in both languages."""

  def __init__(self, seed: int):
    self._rng = np.random.default_rng(seed)

  def sentence(self) -> tuple[str, str]:
    """A sentence in English and in German."""
    form = self._rng.choice(["plain", "place", "first", "that", "wants", "asks"])
    english, german, plural = self._noun(PEOPLE, "nom")
    what = self._noun(THINGS, "acc")
    he, they, er, infinitive, prefix = self._one(VERBS)
    prefix = "" if prefix == "-" else prefix
    verb, finite = (they, infinitive) if plural else (he, er)
    where, wo = self._one(PLACES if self._rng.uniform() < 0.7 else TIMES, "=")
    mit = f" {prefix}" * bool(prefix)
    match form:
      case "plain":
        pair = f"{english} {verb} {what[0]}.", f"{german} {finite} {what[1]}{mit}."
      case "place":
        pair = f"{english} {verb} {what[0]} {where}.", f"{german} {finite} {wo} {what[1]}{mit}."
      case "first":
        pair = f"{where}, {english} {verb} {what[0]}.", f"{wo} {finite} {german} {what[1]}{mit}."
      case "that":
        who = self._noun(PEOPLE, "nom")
        say, sagt = ("say", "sagen") if who[2] else ("says", "sagt")
        pair = (
          f"{who[0]} {say} that {english} {verb} {what[0]} {where}.",
          f"{who[1]} {sagt}, dass {german} {wo} {what[1]} {prefix}{finite}.",
        )
      case "wants":
        want, will = ("want", "wollen") if plural else ("wants", "will")
        pair = (
          f"{english} {want} to {they} {what[0]} {where}.",
          f"{german} {will} {wo} {what[1]} {prefix}{infinitive}.",
        )
      case _:
        do = "do" if plural else "does"
        pair = f"{do} {english} {they} {what[0]}?", f"{finite} {german} {what[1]}{mit}?"
    return tuple(text[0].upper() + text[1:] for text in pair)

  def _one(self, table: str, separator: str | None = None) -> list[str]:
    choices = _words(table, separator)
    return choices[self._rng.integers(len(choices))]

  def _noun(self, table: str, case: str) -> tuple[str, str, bool]:
    """A noun with its article and maybe an adjective, in both languages, and whether it is plural."""
    singular, many, gender, einzahl, mehrzahl = self._one(table)
    kind = self._rng.choice(["a", "the", "this", "many", "all"])
    of_ein, of_der, of_dieser, mixed, weak = ENDS[case, gender]
    number = self._rng.choice(list(NUMBERS))
    article, artikel, ending = {
      "a": ("a", f"ein{of_ein}", mixed),
      "the": ("the", f"d{of_der}", weak),
      "this": ("this", f"dies{of_dieser}", weak),
      "many": (number, NUMBERS[number], "e"),
      "all": ("the", "die", "en"),
    }[kind]
    plural = kind in ("many", "all")
    words, wörter = [article], [artikel]
    if self._rng.uniform() < 0.4:
      adjective, adjektiv = self._one(ADJECTIVES[table])
      words, wörter = [*words, adjective], [*wörter, adjektiv + ending]
    words.append(many if plural else singular)
    wörter.append(mehrzahl if plural else einzahl)
    if words[0] == "a" and words[1][0] in "aeiou":
      words[0] = "an"
    return " ".join(words), " ".join(wörter), plural


def make_pairs_sample(out: pathlib.Path, size: int = 700, seed: int = 0) -> None:
  """Writes pairs_{train,dev,test}.tsv.xz, with no sentence twice, and pairs_bpe.json.

  Args:
    out: the folder of the sample.
    size: entries of the vocabulary.
    seed: of the sentences.
  """
  grammar, pairs = Grammar(seed), {}
  while len(pairs) < sum(SPLITS.values()):
    english, german = grammar.sentence()
    pairs.setdefault(english, german)
  rows, start = list(pairs.items()), 0
  out.mkdir(parents=True, exist_ok=True)
  for split, number in SPLITS.items():
    text = "".join(f"{english}\t{german}\n" for english, german in rows[start : start + number])
    content = lzma.compress(f"en\tde\n{text}".encode(), preset=9 | lzma.PRESET_EXTREME)
    (out / f"pairs_{split}.tsv.xz").write_bytes(content)
    start += number
  train = [text for pair in rows[: SPLITS["train"]] for text in pair]
  Subwords.train(train, size).save(out / "pairs_bpe.json")


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--out", type=pathlib.Path, required=True)
  parser.add_argument("--size", type=int, default=700)
  parser.add_argument("--seed", type=int, default=0)
  make_pairs_sample(**vars(parser.parse_args()))


if __name__ == "__main__":
  main()
