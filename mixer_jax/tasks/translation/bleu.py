"""BLEU by sacrebleu, which splits words, smooths, and signs the score."""

from typing import Any, NamedTuple, Sequence

from mixer_jax.errors import UserError

TOKENIZERS = ("13a", "intl", "char", "zh", "none")


class Bleu(NamedTuple):
  """A score from 0 to 100, and sacrebleu's signature of its computation."""

  score: float
  signature: str


def metric(tokenizer: str = "13a") -> Any:
  """sacrebleu's corpus BLEU (Post, 2018); a UserError if it is not installed."""
  try:
    from sacrebleu.metrics import BLEU
  except ImportError as error:
    install = "pip install 'mixer_jax[translation]'"
    raise UserError(f"BLEU needs sacrebleu, which is not installed: {install}") from error
  return BLEU(tokenize=tokenizer)


def corpus(found: Sequence[str], references: Sequence[str], tokenizer: str = "13a") -> Bleu:
  """BLEU of translations, each with one reference, as `sacrebleu REFERENCES -i FOUND` gives it."""
  by = metric(tokenizer)
  score = by.corpus_score(list(found), [list(references)]).score
  return Bleu(score, by.get_signature().format())
