"""WordPiece vocabularies: BERT's own, or one that is trained on the user's text."""

import collections
import contextlib
import functools
import hashlib
import logging
import os
from typing import Any, Callable, Iterable, Iterator, Sequence

import numpy as np

from mixer_jax.errors import UserError, as_user_error
from mixer_jax.paths import user_path

PAD, UNK, CLS, SEP, MASK = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_PIECE = 100_000  # characters; an Encoding takes 100 bytes and more for each token
# A trained vocabulary has entries for 1,000 characters, or for as many as make up this share of the
# text, up to this part of all entries.
_ALPHABET, _COVERED, _ROOM = 1000, 0.9995, 0.75
_LOG = logging.getLogger(__name__)
_VARIABLE = "TOKENIZERS_PARALLELISM"
_ALLOWED = os.environ.get(_VARIABLE, "true")


class Vocabulary:
  """WordPiece (Schuster and Nakajima, 2012) after BERT's basic tokenisation (Devlin et al., 2019).

  `words` has the entry of each id, `pad`, `unk`, `cls`, `sep` and `mask` are ids. Texts lose their
  capitals if no entry has one, and likewise their accents; entries [..] and <..> do not count.
  A UserError, which names `source`, if entries are double or a special one is missing.
  """

  def __init__(self, words: Sequence[str], source: str = "vocabulary"):
    self.words, self._ids = list(words), {}
    for i, word in enumerate(self.words):
      if (first := self._ids.setdefault(word, i)) != i:
        raise UserError(
          f"{source}: line {i + 1}: entry {word[:100]!r} stands in line {first + 1} too"
        )
    if missing := [word for word in SPECIAL if word not in self._ids]:
      raise UserError(
        f"{source}: has no entry {', '.join(missing)}; needed are {' '.join(SPECIAL)}"
      )
    self.pad, self.unk, self.cls, self.sep, self.mask = (self._ids[word] for word in SPECIAL)

  @classmethod
  def read(cls, path: str | os.PathLike) -> "Vocabulary":
    """Reads a file with one entry a line, such as BERT's vocab.txt; or a UserError."""
    with as_user_error(f"{path}: vocabulary cannot be read", OSError):
      content = user_path(path).read_bytes()
    with as_user_error(f"{path}: vocabulary is not UTF-8", UnicodeDecodeError):
      text = content.decode("utf-8-sig")
    lines = text.split("\n")  # not splitlines: separators of other kinds may be entries
    return cls([x.removesuffix("\r") for x in (lines if lines[-1] else lines[:-1])], str(path))

  @classmethod
  def train(
    cls, documents: Iterable[str], size: int, lowercase: bool = True, min_frequency: int = 2
  ) -> "Vocabulary":
    """Learns entries from texts, the same ones each time.

    Of characters it takes the most frequent 1,000; of a text with more, such as Chinese, as many as
    cover 99.95% of it, up to three quarters of `size`. A warning tells of a larger share left out.

    Args:
      documents: can be iterated over twice.
      size: entries at most, special ones and letters included; fewer if the texts have no more.
      lowercase: leave out capitals and accents.
      min_frequency: of pairs of entries that become one.

    Raises:
      UserError: `size` is too small for the letters, or there are none.
    """
    from tokenizers import Tokenizer, models, trainers

    normalizer, splitter = _basic(lowercase, lowercase)
    counts = collections.Counter()
    for text in documents:
      counts.update(normalizer.normalize_str(clean(text)))
    is_inside = lambda char: len(_split(normalizer, splitter, "a" + char)) == 1
    letters = _letters(counts, size, is_inside)
    inside = [char for char in letters if is_inside(char)]
    # The library numbers the letters by hashes that differ from run to run, and ties between pairs
    # by these numbers. Entries that are given keep their order.
    given = [*SPECIAL, *letters, *(f"##{c}" for c in inside)]
    if not letters:
      raise UserError("the text for a vocabulary has no letters")
    if size < len(given):
      raise UserError(f"vocabulary size {size}: too small; the text's letters take {len(given)}")
    tokenizer = Tokenizer(models.WordPiece(unk_token=UNK))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, splitter
    trainer = trainers.WordPieceTrainer(
      vocab_size=size,
      min_frequency=min_frequency,
      special_tokens=given,
      limit_alphabet=len(letters),
      initial_alphabet=letters,
      show_progress=False,
    )
    with threads(True):
      tokenizer.train_from_iterator(map(clean, documents), trainer)
    ids = tokenizer.get_vocab()
    return cls(sorted(ids, key=ids.get))

  @property
  def size(self) -> int:
    return len(self.words)

  @functools.cached_property
  def lowercase(self) -> bool:
    return all(word == word.lower() for word in self._ordinary)

  @functools.cached_property
  def without_accents(self) -> bool:
    from tokenizers import normalizers

    strip = normalizers.BertNormalizer(
      lowercase=False, strip_accents=True, handle_chinese_chars=False, clean_text=False
    )
    return all(word == strip.normalize_str(word) for word in self._ordinary)

  @property
  def _ordinary(self) -> list[str]:
    """The entries without [..], which are special, and <..>, such as <S> in BERT's Chinese one."""
    return [word for word in self.words if word[:1] + word[-1:] not in ("[]", "<>")]

  def fingerprint(self) -> str:
    """A hash of the entries."""
    return hashlib.sha256("\n".join(self.words).encode()).hexdigest()

  def encode(self, texts: Sequence[str], parallel: bool = False) -> list[np.ndarray]:
    """The ids of each text, int32 [tokens], without [CLS] and [SEP].

    Special entries that a text has, such as [MASK], are kept as they are. `parallel` takes a thread
    for each CPU; the ids are the same.
    """
    pieces = [list(_pieces(clean(text))) for text in texts]
    flat = [piece for some in pieces for piece in some]
    with threads(parallel):
      found = iter(self._tokenizer.encode_batch_fast(flat, add_special_tokens=False))
    return [np.concatenate([np.array(next(found).ids, np.int32) for _ in some]) for some in pieces]

  def decode(self, ids: Iterable[int]) -> str:
    """Words with a space between them, without [PAD], [CLS] and [SEP]."""
    left_out = (self.pad, self.cls, self.sep)
    return " ".join(self.words[i] for i in ids if i not in left_out).replace(" ##", "")

  def save(self, path: str | os.PathLike) -> None:
    """Writes one entry a line; a UserError if the file cannot be written."""
    with as_user_error(f"{path}: vocabulary cannot be written", OSError):
      user_path(path).write_bytes("".join(f"{x}\n" for x in self.words).encode())

  @functools.cached_property
  def _tokenizer(self) -> Any:
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.WordPiece(dict(self._ids), unk_token=UNK))
    tokenizer.normalizer, tokenizer.pre_tokenizer = _basic(self.lowercase, self.without_accents)
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def _basic(lowercase: bool, strip_accents: bool) -> tuple[Any, Any]:
  """BERT's basic tokenisation: its normalizer and its splitter."""
  from tokenizers import normalizers, pre_tokenizers

  normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip_accents)
  return normalizer, pre_tokenizers.BertPreTokenizer()


def _letters(counts: collections.Counter, size: int, is_inside: Callable[[str], bool]) -> list[str]:
  """The characters that get entries, two if they may be inside of a word, by their numbers."""
  ranked = sorted((-n, char) for char, n in counts.items() if not char.isspace())
  shares = np.cumsum([-n for n, _ in ranked]) / max(1, -sum(n for n, _ in ranked))
  entries = np.cumsum([1 + is_inside(char) for _, char in ranked])
  covering, fitting = np.searchsorted(shares, _COVERED) + 1, np.searchsorted(entries, _ROOM * size)
  taken = max(_ALPHABET, min(covering, fitting))
  if taken < covering:
    left, share = len(ranked) - taken, 100 * (1 - shares[taken - 1])
    line = "%s characters, %.1f%% of the text, are left out and become %s; a larger size takes more"
    _LOG.warning(line, f"{left:,}", share, UNK)
  return sorted(char for _, char in ranked[:taken])


def _split(normalizer: Any, splitter: Any, text: str) -> list[tuple[str, tuple[int, int]]]:
  return splitter.pre_tokenize_str(normalizer.normalize_str(text))


def clean(text: str) -> str:
  """A text without lone surrogates, which JSON may have and the library refuses."""
  return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _pieces(text: str) -> Iterator[str]:
  """Cuts a very long text at spaces, which changes no token."""
  start = 0
  while (end := text.find(" ", start + _PIECE)) >= 0:
    yield text[start:end]
    start = end
  yield text[start:]


@contextlib.contextmanager
def threads(parallel: bool) -> Iterator[None]:
  """Lets the library use threads, unless the user's environment says no.

  Afterwards, it is told to use none: a process that is forked then would hang in them.
  """
  os.environ[_VARIABLE] = _ALLOWED if parallel else "false"
  try:
    yield
  finally:
    os.environ[_VARIABLE] = "false"
