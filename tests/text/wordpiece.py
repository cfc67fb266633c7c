"""BERT's tokenisation in plain Python, after the papers, to compare with."""

import re
import unicodedata

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CJK = (
  (0x4E00, 0x9FFF),
  (0x3400, 0x4DBF),
  (0x20000, 0x2A6DF),
  (0x2A700, 0x2B73F),
  (0xF900, 0xFAFF),
)


def encode(text, words, lowercase):
  """The ids of a text, a list of int."""
  ids = {word: i for i, word in enumerate(words)}
  found = []
  for part in re.split(r"(\[(?:PAD|UNK|CLS|SEP|MASK)\])", text):
    if part in SPECIAL:
      found.append(ids[part])
    else:
      found += [i for word in _words(part, lowercase) for i in _pieces(word, ids)]
  return found


def _words(text, lowercase):
  text = "".join(map(_cleaned, text))
  if lowercase:
    text = unicodedata.normalize("NFD", text)
    text = "".join(c for c in text if unicodedata.category(c) != "Mn").lower()
  return "".join(f" {c} " if _is_punctuation(c) else c for c in text).split()


def _cleaned(char):
  if char.isspace():
    return " "
  if char in "\0\ufffd" or unicodedata.category(char).startswith("C"):
    return ""
  return f" {char} " if any(low <= ord(char) <= high for low, high in CJK) else char


def _is_punctuation(char):
  symbol = char.isascii() and char.isprintable() and not char.isalnum() and char != " "
  return symbol or unicodedata.category(char).startswith("P")


def _pieces(word, ids):
  """The longest entry first, again and again."""
  found, start = [], 0
  while start < len(word):
    for end in range(len(word), start, -1):
      piece = "##" * (start > 0) + word[start:end]
      if piece in ids:
        break
    else:
      return [ids["[UNK]"]]
    found.append(ids[piece])
    start = end
  return found if len(word) <= 100 else [ids["[UNK]"]]
