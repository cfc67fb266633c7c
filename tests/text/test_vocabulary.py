"""WordPiece against an independent one; files of vocabularies; the command that trains one."""

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from mixer_jax.text import records, sample
from mixer_jax.text.vocabulary import SPECIAL, Vocabulary
from tests.text import wordpiece

ROOT = pathlib.Path(__file__).parent.parent.parent
ODD = [
  "",
  " \t\n",
  "Ünïcödé, CAFÉ!",
  "na\u0131ve \u0130stanbul ﬁne ß ΑΣ",
  "a\u0301b\u200dc \u00adsoft\u00a0hard\u3000wide",
  "日本語 and 中文mixed한국어",
  "e-mail@host.com $5 ^x `y` <unk> ~z |",
  "“quoted” – dash … ‘single’",
  "🎬 film 👍🏽",
  "x" * 100,
  "x" * 101,
  "a [MASK] film [SEP] of[MASK]the [mask] [PAD][CLS] [MASK",
  "tab\tand\rreturn\x00\x07\ufffd",
]


@pytest.fixture(scope="module")
def vocabulary():
  return Vocabulary.read(sample.VOCABULARY)


@pytest.fixture(scope="module")
def sentences():
  return records.rows(str(sample.SPLITS["dev"]), sample.TEXT).texts[:400]


def test_ids_equal_an_independent_wordpiece(vocabulary, sentences):
  texts = sentences + [text.title() for text in sentences[:50]] + ODD
  assert vocabulary.lowercase
  for text, ids in zip(texts, vocabulary.encode(texts), strict=True):
    assert ids.dtype == np.int32
    assert ids.tolist() == wordpiece.encode(text, vocabulary.words, True), text


def test_a_cased_vocabulary_keeps_capitals_and_accents(sentences):
  texts = [text.title() for text in sentences[:100]] + ["Crème brûlée"] * 3
  cased = Vocabulary.train(texts, 400, lowercase=False)
  assert not cased.lowercase and "ê" not in cased.words and "è" in cased.words
  for text, ids in zip(texts + ODD, cased.encode(texts + ODD), strict=True):
    assert ids.tolist() == wordpiece.encode(text, cased.words, False), text


def test_entries_in_brackets_have_no_say_in_capitals():
  """BERT's Chinese vocabulary has <S> and <T>, and no other capital."""
  words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<S>", "<T>", "<", "的", "apple", "##s"]
  vocabulary = Vocabulary(words)
  found = vocabulary.encode(["Apples 的 <S>"])[0]
  assert [words[i] for i in found] == ["apple", "##s", "的", "<", "[UNK]", "[UNK]"]
  assert not Vocabulary([*words, "S"]).lowercase


def test_accents_are_kept_where_entries_have_some(tmp_path):
  texts = ["der große bär läuft", "das mädchen hört den bär"] * 3
  cased = Vocabulary.train(texts, 60, lowercase=False)
  cased.save(tmp_path / "vocab.txt")
  again = Vocabulary.read(tmp_path / "vocab.txt")
  assert again.lowercase and not again.without_accents  # no capital was seen
  for text, ids in zip(texts, again.encode([text.title() for text in texts]), strict=True):
    assert again.decode(ids) == text


def test_threads_and_very_long_texts_change_no_id(vocabulary, sentences):
  one, many = vocabulary.encode(sentences), vocabulary.encode(sentences, parallel=True)
  for a, b in zip(one, many, strict=True):
    np.testing.assert_array_equal(a, b)
  assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
  long = " ".join(sentences * 7)
  assert len(long) > 250_000
  np.testing.assert_array_equal(vocabulary.encode([long])[0], np.concatenate(one * 7))


def test_a_lone_surrogate_is_replaced(vocabulary):
  (ids,) = vocabulary.encode(["good \ud800 film"])
  assert vocabulary.decode(ids) == "good ? film"


def test_decoding_gives_the_words(vocabulary, sentences):
  for text, ids in zip(sentences, vocabulary.encode(sentences), strict=True):
    if vocabulary.unk not in ids:
      split = " ".join(wordpiece._words(text, True))
      padded = [vocabulary.cls, *ids, vocabulary.sep, vocabulary.pad]
      assert vocabulary.decode(padded) == split
  assert vocabulary.decode([vocabulary.mask]) == "[MASK]"


def test_a_vocabulary_is_saved_and_read(vocabulary, tmp_path):
  vocabulary.save(tmp_path / "vocab.txt")
  again = Vocabulary.read(tmp_path / "vocab.txt")
  assert again.words == vocabulary.words and again.fingerprint() == vocabulary.fingerprint()
  assert (again.pad, again.unk, again.cls, again.sep, again.mask) == (0, 1, 2, 3, 4)
  (tmp_path / "dos.txt").write_bytes("\r\n".join(vocabulary.words).encode())
  assert Vocabulary.read(tmp_path / "dos.txt").words == vocabulary.words


@pytest.mark.thorough
def test_training_gives_the_same_entries_in_every_process(vocabulary, sentences, tmp_path):
  """The library alone would not: its order of letters is that of a hash table."""
  here = Vocabulary.train(sentences, 1000).words
  assert len(here) == 1000 and here[:5] == list(SPECIAL)
  (tmp_path / "a.txt").write_text("\n".join(sentences))
  out = tmp_path / "vocab.txt"
  line = [sys.executable, "-m", "mixer_jax.text", f"--out={out}", "--size=1000"]
  done = subprocess.run(
    [*line, str(tmp_path / "a.txt")], capture_output=True, text=True, cwd=ROOT, timeout=100
  )
  assert done.returncode == 0, done.stderr
  words = sum(len(text.split()) for text in sentences)
  assert done.stdout.startswith(f"{out}: 1,000 entries from {words:,} words in ")
  assert done.stdout.count("\n") == 1
  assert Vocabulary.read(out).words == here


@pytest.mark.thorough
def test_the_command_names_what_is_missing(tmp_path):
  line = [sys.executable, "-m", "mixer_jax.text", f"--out={tmp_path}/v", f"{tmp_path}/no.txt"]
  done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, timeout=100)
  assert done.returncode == 2
  assert done.stderr == f"error: '{tmp_path}/no.txt': no such file or folder of text\n"


def test_a_text_of_many_characters_has_entries_for_nearly_all_of_it(caplog):
  """Each of 3,000 Chinese characters is a word of its own, drawn by Zipf's law."""
  rng, characters = np.random.default_rng(0), [chr(0x4E00 + i) for i in range(3000)]
  shares = 1 / (np.arange(3000) + 10)
  texts = ["".join(rng.choice(characters, 200, p=shares / shares.sum())) for _ in range(500)]
  unknown = lambda v: np.mean(np.concatenate(v.encode(texts)) == v.unk)
  whole = Vocabulary.train(texts, 8000)
  assert 2500 < whole.size and unknown(whole) < 6e-4 and not caplog.messages
  half = Vocabulary.train(texts, 2000)
  assert (
    half.size <= 2000 and f"{100 * unknown(half):.1f}% of the text, are left out" in caplog.text
  )


def test_a_text_of_few_characters_has_an_entry_for_each():
  """Also for a letter that is seen once in a million."""
  vocabulary = Vocabulary.train(["ab " * 300_000 + "z"], 20)
  assert {"a", "##a", "z", "##z"} <= set(vocabulary.words)


def test_spaces_of_other_kinds_may_be_entries(tmp_path):
  """As in the vocabulary of bert-base-chinese."""
  words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "\u2028", "\u3000", "a"]
  (tmp_path / "vocab.txt").write_bytes("\n".join(words).encode())
  assert Vocabulary.read(tmp_path / "vocab.txt").words == words


def test_the_room_needs_no_jax_and_loads_the_library_late():
  program = (
    "import sys, mixer_jax.text.sequences, mixer_jax.text.records, mixer_jax.text.sample;"
    "assert not {'jax', 'tokenizers', 'tensorflow_datasets'} & set(sys.modules)"
  )
  subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
