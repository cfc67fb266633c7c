"""Sequences against plain Python; the cache; corpora that are read once, chunk by chunk."""

import numpy as np
import pytest

from mixer_jax.errors import UserError
from mixer_jax.text import records, sample, sequences
from mixer_jax.text.documents import documents
from mixer_jax.text.vocabulary import SPECIAL, Vocabulary


@pytest.fixture(scope="module")
def vocabulary():
  return Vocabulary.read(sample.VOCABULARY)


@pytest.fixture(scope="module")
def texts():
  return records.rows(str(sample.SPLITS["dev"]), sample.TEXT).texts[:300]


@pytest.fixture
def corpus(texts, tmp_path):
  (tmp_path / "a.txt").write_text("\n".join([*texts, "\x07"]))  # of the last no token is left
  return documents(str(tmp_path / "a.txt"))


def _pack(corpus, vocabulary, tmp_path, max_length=16, mode="packed"):
  return sequences.pack(corpus, vocabulary, max_length, mode, str(tmp_path / "cache"))


def _rows(arrays):
  """The tokens of each sequence, whose padding is checked."""
  for ids, length in zip(arrays["ids"].tolist(), arrays["length"].tolist(), strict=True):
    assert not any(ids[length:])  # [PAD] is 0
    yield ids[:length]


def _packed(tokens, vocabulary, max_length):
  stream = [i for each in tokens for i in (*each, vocabulary.sep)]
  width = max_length - 1
  parts = [stream[i : i + width] for i in range(0, len(stream), width)]
  return [[vocabulary.cls, *part] for part in parts]


def _cut(tokens, vocabulary, max_length):
  return [[vocabulary.cls, *each[: max_length - 2], vocabulary.sep] for each in tokens]


@pytest.mark.parametrize("characters", [10, 2000, 2**20])
@pytest.mark.parametrize("max_length", [4, 16, 512])
@pytest.mark.parametrize("mode", sequences.MODES)
@pytest.mark.first(6)
def test_documents_equal_plain_python(
  mode, max_length, characters, corpus, vocabulary, texts, tmp_path, monkeypatch
):
  monkeypatch.setattr(sequences, "_CHARACTERS", characters)
  monkeypatch.setattr(sequences, "_ROWS", 7)
  found = _pack(corpus, vocabulary, tmp_path, max_length, mode)
  tokens = [ids.tolist() for ids in vocabulary.encode(texts)]
  make = {"cut": _cut, "packed": _packed}[mode]
  assert list(_rows(found.arrays)) == make(tokens, vocabulary, max_length)
  assert found.arrays["ids"].dtype == np.uint16 and found.arrays["length"].dtype == np.int32
  assert isinstance(found.arrays["ids"], np.memmap)
  lost = [len(each) - (max_length - 2) for each in tokens if len(each) > max_length - 2]
  lost = lost if mode == "cut" else []
  assert (found.documents, found.cut, found.dropped) == (len(texts), len(lost), sum(lost))
  line = f"{len(lost)} of 300 documents are longer than max_length={max_length}: "
  assert found.summary(max_length) == (line + f"{sum(lost):,} tokens are left out" if lost else "")


def test_the_cache_is_reused_until_something_changes(corpus, vocabulary, texts, tmp_path):
  calls = []

  class Counted(Vocabulary):
    def encode(self, *args, **kwargs):
      calls.append(1)
      return super().encode(*args, **kwargs)

  def built(corpus, words=vocabulary.words, **options):
    calls.clear()
    found = _pack(corpus, Counted(words), tmp_path, **options)
    return bool(calls), found.arrays["ids"]

  first, ids = built(corpus)
  again, same = built(corpus)
  assert first and not again
  np.testing.assert_array_equal(ids, same)
  assert built(corpus, mode="cut")[0] and built(corpus, max_length=8)[0]
  assert built(corpus, vocabulary.words[:-1])[0]
  (tmp_path / "a.txt").write_text("\n".join(texts[:2]))
  changed, ids = built(documents(corpus.source))
  assert changed and list(_rows({"ids": ids, "length": (ids != 0).sum(1)})) == _packed(
    [x.tolist() for x in vocabulary.encode(texts[:2])], vocabulary, 16
  )


def test_a_cache_that_cannot_be_written_costs_only_time(corpus, vocabulary, tmp_path):
  (tmp_path / "cache").write_text("no folder")
  found = _pack(corpus, vocabulary, tmp_path)
  assert len(found.arrays["ids"]) == len(found.arrays["length"]) > 100


def test_large_vocabularies_take_int32(tmp_path, corpus):
  vocabulary = Vocabulary([*SPECIAL, *map(str, range(2**16))])
  assert _pack(corpus, vocabulary, tmp_path).arrays["ids"].dtype == np.int32
  assert sequences.pairs(["65535"], None, vocabulary, 4).arrays["ids"].tolist() == [
    [2, 65540, 3, 0]
  ]


def test_text_without_tokens_is_refused(vocabulary, tmp_path):
  (tmp_path / "b.txt").write_text("\x07")
  with pytest.raises(UserError, match="b.txt: has no text"):
    _pack(documents(str(tmp_path / "b.txt")), vocabulary, tmp_path)


def _bert_pair(a, b, room):
  a, b = list(a), list(b)
  while len(a) + len(b) > room:
    (a if len(a) > len(b) else b).pop()
  return a, b


def test_pairs_equal_plain_python(vocabulary, texts, monkeypatch):
  monkeypatch.setattr(sequences, "_DOCUMENTS", 64)
  seconds = [text for k in (1, 2, 0) for text in texts[k::3]]
  tokens, others = ([x.tolist() for x in vocabulary.encode(each)] for each in (texts, seconds))
  cuts = []
  for max_length in (4, 5, 17, 32, 33, 256):
    found = sequences.pairs(texts, seconds, vocabulary, max_length)
    expected, starts, cut = [], [], 0
    for a, b in zip(tokens, others):
      x, y = _bert_pair(a, b, max_length - 3)
      expected.append([vocabulary.cls, *x, vocabulary.sep, *y, vocabulary.sep])
      starts.append(len(x) + 2)
      cut += len(x) + len(y) < len(a) + len(b)
    assert list(_rows(found.arrays)) == expected
    assert found.arrays["segment_start"].tolist() == starts and found.cut == cut
    cuts.append(cut)
  assert cuts[0] == len(texts) and 0 < cuts[2] and cuts[-1] == 0


def test_single_texts_are_cut_at_the_end(vocabulary, texts):
  found = sequences.pairs(texts, None, vocabulary, 20)
  tokens = [x.tolist() for x in vocabulary.encode(texts)]
  assert list(_rows(found.arrays)) == _cut(tokens, vocabulary, 20)
  assert found.cut == sum(len(x) > 18 for x in tokens) > 0
  assert set(found.arrays["segment_start"].tolist()) == {20}
