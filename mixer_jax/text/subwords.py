"""Subword vocabularies from which a text comes back as it was: byte pairs, for translation."""

import functools
import hashlib
import json
import os
from typing import Any, Iterable, Sequence

import numpy as np

from mixer_jax.errors import UserError, as_user_error
from mixer_jax.paths import user_path
from mixer_jax.text.vocabulary import clean, threads

PAD, BOS, EOS = SPECIAL = ("<pad>", "<s>", "</s>")
_BYTES = 256
_MAKE = "make one of your text: python -m mixer_jax.text --kind=bpe --out=bpe.json --size=8000 FILE"


class Subwords:
  """Byte-level byte pair encoding (Sennrich et al., 2016; Radford et al., 2019).

  Any text can be encoded, in any language, and `decode` gives it back with case and spaces. `pad`,
  `bos` and `eos` are ids, which no text has. `tokenizer` is a `tokenizers.Tokenizer`.
  """

  def __init__(self, tokenizer: Any, source: str = "vocabulary"):
    from tokenizers import decoders, models, pre_tokenizers

    kinds = (tokenizer.model, models.BPE), (tokenizer.decoder, decoders.ByteLevel)
    if missing := [word for word in SPECIAL if tokenizer.token_to_id(word) is None]:
      raise UserError(
        f"{source}: has no entry {', '.join(missing)}; needed are {' '.join(SPECIAL)}"
      )
    if not all(isinstance(part, kind) for part, kind in kinds) or tokenizer.normalizer is not None:
      why = "which gives texts back as they were"
      raise UserError(f"{source}: is no byte-level BPE without a normalizer, {why}; {_MAKE}")
    entries = tokenizer.get_vocab()
    self._tokenizer, self.size = tokenizer, len(entries)
    if sorted(entries.values()) != list(range(self.size)):
      raise UserError(f"{source}: its ids are not 0 to {self.size - 1}, each once")
    if lacking := set(pre_tokenizers.ByteLevel.alphabet()) - entries.keys():
      raise UserError(f"{source}: lacks {len(lacking)} of the 256 bytes, such as {min(lacking)!r}")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # "</s>" in a text is no end
    # No space is added before a text, or it would come back with one.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    self.pad, self.bos, self.eos = (tokenizer.token_to_id(word) for word in SPECIAL)

  @classmethod
  def read(cls, path: str | os.PathLike) -> "Subwords":
    """Reads a tokenizer.json; a UserError if it is none."""
    from tokenizers import Tokenizer

    with as_user_error(f"{path}: vocabulary cannot be read", OSError):
      content = user_path(path).read_bytes()
    with as_user_error(f"{path}: is no tokenizer.json; {_MAKE}. The library says"):
      tokenizer = Tokenizer.from_str(content.decode("utf-8-sig"))
    return cls(tokenizer, str(path))

  @classmethod
  def train(cls, documents: Iterable[str], size: int, min_frequency: int = 2) -> "Subwords":
    """Learns entries from texts, the same ones each time.

    Args:
      documents: can be iterated over.
      size: entries at most, with the special ones and the 256 bytes; fewer of a short text.
      min_frequency: of pairs of entries that become one.

    Raises:
      UserError: `size` is too small for the bytes, or no pair of letters comes often enough.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if size < (least := len(SPECIAL) + _BYTES):
      raise UserError(f"vocabulary size {size}: too small; special entries and bytes take {least}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    # The library numbers an alphabet in an order that differs from run to run, and breaks ties
    # between pairs by these numbers. Entries that are given keep their order.
    given = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    trainer = trainers.BpeTrainer(
      vocab_size=size, min_frequency=min_frequency, special_tokens=given, show_progress=False
    )
    with threads(True):
      tokenizer.train_from_iterator(map(clean, documents), trainer)
    # A new one: entries that were given would be found in texts as wholes.
    model = json.loads(tokenizer.to_str())["model"]
    if not model["merges"] and size > least:
      why = f"no two letters of the text come {min_frequency} times together"
      raise UserError(f"there is no vocabulary to learn: {why}")
    made = Tokenizer(models.BPE(model["vocab"], [tuple(pair) for pair in model["merges"]]))
    made.decoder = decoders.ByteLevel()
    return cls(made)

  def encode(self, texts: Sequence[str], parallel: bool = False) -> list[np.ndarray]:
    """The ids of each text, int32 [tokens]; `parallel` takes a thread for each CPU."""
    with threads(parallel):
      found = self._tokenizer.encode_batch_fast(list(map(clean, texts)), add_special_tokens=False)
    return [np.array(encoding.ids, np.int32) for encoding in found]

  def decode(self, ids: Iterable[int]) -> str:
    """The text of ids up to the first `eos`, without other special ones.

    Bytes that are no UTF-8, which `encode` never gives, become U+FFFD.
    """
    kept = []
    for i in map(int, ids):
      if i == self.eos:
        break
      if i not in (self.pad, self.bos):
        kept.append(i)
    return self._tokenizer.decode(kept, skip_special_tokens=False)

  def tokens(self, ids: Iterable[int]) -> list[str]:
    """Entries as a person reads them, for pictures."""
    words = (self._tokenizer.id_to_token(int(i)) for i in ids)
    return [w if w in SPECIAL else self._tokenizer.decoder.decode([w]) for w in words]

  def fingerprint(self) -> str:
    """A hash of the entries and merges."""
    return hashlib.sha256(self._content.encode()).hexdigest()

  def save(self, path: str | os.PathLike) -> None:
    """Writes a tokenizer.json; a UserError if the file cannot be written."""
    with as_user_error(f"{path}: vocabulary cannot be written", OSError):
      user_path(path).write_text(self._content, encoding="utf-8")

  @functools.cached_property
  def _content(self) -> str:
    return self._tokenizer.to_str()
