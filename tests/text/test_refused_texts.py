"""Files of text that are no such: each mistake is a line that names the file and its place."""

import gzip
import json

import pytest

from mixer_jax.errors import UserError
from mixer_jax.text import __main__ as command
from mixer_jax.text.documents import documents
from mixer_jax.text.pairs import pairs
from mixer_jax.text.records import rows
from mixer_jax.text.subwords import EOS, Subwords
from mixer_jax.text.vocabulary import Vocabulary

GOOD = b"label\tsentence\n0\ta film\n1\tgood\n"
WORDS = b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n"


def labelled(path):
  return rows(path, "sentence")


def read(path):
  return list(documents(path))


def translated(path):
  return pairs(path.removesuffix(".en"), "en", "de")


@pytest.mark.parametrize(
  "reader, name, content, expected",
  [
    (labelled, "a.tsv", b"label\ttext\n0\tb\n", "line 2: no column 'sentence'; columns are"),
    (labelled, "a.tsv", b"label\tsentence\n0\tb\n1\n", "line 3: 1 fields, .* header has 2"),
    (labelled, "a.tsv", b"label\tsentence\n0\t \n", "line 2: a column is empty"),
    (labelled, "a.tsv", b"label\tlabel\n0\t1\n", "line 1: a column stands twice"),
    (labelled, "a.tsv", b"label\tsentence\n", "is empty"),
    (labelled, "a.tsv", b"label\tsentence\r0\tgood\r", "is empty"),  # Excel's for an old Mac
    (labelled, "a.csv", b"label,sentence\r0,good\r", "broken CSV: new-line character"),
    (labelled, "a.tsv", GOOD + b"0\tab\xff\n", "line 4 is not UTF-8"),
    (labelled, "a.csv", b'label,sentence\n0,a\n0,"a\n', "line 3: broken CSV"),
    (labelled, "a.jsonl", b'{"sentence": "a", "label": 0}\n{"sen\n', "line 2: broken JSON"),
    (labelled, "a.jsonl", b"[1]\n", "line 1 is no JSON object"),
    (labelled, "a.jsonl", b'{"sentence": 3, "label": 0}\n', "line 1: column 'sentence' is int"),
    (labelled, "a.jsonl", b'{"sentence": "a", "label": null}\n', "column 'label' is null"),
    (labelled, "a.tsv.gz", gzip.compress(GOOD)[:-9], "cannot be read"),
    (labelled, "a.tsv.gz", GOOD, "cannot be read: Not a gzipped file"),
    (labelled, "a.tsv.xz", GOOD, "cannot be read"),
    (labelled, "a.txt", b"text", "has no columns; allowed: .tsv"),
    (labelled, "a.tsv", None, "cannot be read: No such file"),
    (read, "a.pdf", b"text", "no known ending; allowed: .txt"),
    (read, "a.txt", b" \n\n", "is empty"),
    (read, "a.txt", None, "no such file or folder"),
    (translated, "a.en", b"a\nb\n", "a.de: no such file, nor one with .gz"),
    (Vocabulary.read, "v.txt", WORDS + b"\xff\n", "is not UTF-8"),
    (Vocabulary.read, "v.txt", WORDS + b"a\nb\na\n", "line 8: entry 'a' stands in line 6"),
    (Vocabulary.read, "v.txt", WORDS[:-7], r"has no entry \[MASK\]"),
    (Vocabulary.read, "v.txt", None, "cannot be read: No such file"),
    (Subwords.read, "v.json", None, "cannot be read: No such file"),
    (Subwords.read, "v.json", WORDS, "is no tokenizer.json; make one"),
    (Subwords.read, "v.json", b"{}", "is no tokenizer.json"),
  ],
)
def test_a_file_and_its_place_are_named(reader, name, content, expected, tmp_path):
  path = tmp_path / name
  if content is not None:
    path.write_bytes(content)
  with pytest.raises(UserError, match=expected) as caught:
    reader(str(path))
  assert name.partition(".")[0] in str(caught.value) and "\n" not in str(caught.value)


def test_sentences_without_translations(tmp_path):
  (tmp_path / "a.en").write_text("one\ntwo\n")
  (tmp_path / "a.de").write_text("eins\n")
  with pytest.raises(UserError, match="a.en has 2 lines and .*a.de has 1; allowed: as many"):
    pairs(str(tmp_path / "a"), "en", "de")
  (tmp_path / "a.en").write_text(" \n")
  with pytest.raises(UserError, match="a: has no pair of sentences"):
    pairs(str(tmp_path / "a"), "en", "de")


def test_other_tokenizers_are_no_byte_pairs(tmp_path):
  stored = json.loads(Subwords.train(["a film", "a film"], 262)._content)
  model = stored["model"]
  fewer = {("new" if word == "a" else word): i for word, i in model["vocab"].items()}
  no_end = {("<eos>" if word == EOS else word): i for word, i in model["vocab"].items()}
  cases = {
    "is no byte-level BPE": stored | {"normalizer": {"type": "Lowercase"}},
    "its ids are not 0 to": stored | {"model": model | {"vocab": model["vocab"] | {"x": 999}}},
    "lacks 1 of the 256 bytes": stored | {"model": model | {"vocab": fewer, "merges": []}},
    "has no entry </s>": stored | {"model": model | {"vocab": no_end}},
  }
  for message, content in cases.items():
    (tmp_path / "v.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=f"v.json: {message}"):
      Subwords.read(tmp_path / "v.json")


def test_texts_that_teach_no_vocabulary():
  cases = {
    "no two letters": lambda: Subwords.train(["ab", "cd"], 300),
    "size 258: too small": lambda: Subwords.train(["a"], 258),
    "has no letters": lambda: Vocabulary.train(["", " "], 20),
    "size 6: too small": lambda: Vocabulary.train(["many letters"], 6),
  }
  for message, train in cases.items():
    with pytest.raises(UserError, match=message):
      train()


def test_the_command_refuses_what_it_would_read_or_cannot_write(tmp_path):
  (tmp_path / "texts").mkdir()
  (tmp_path / "texts" / "a.txt").write_text("some words\n")
  text = str(tmp_path / "texts")
  cases = {"none/v.txt": "does not exist", "texts": "is a folder", "texts/v.txt": "would be a text"}
  for out, message in cases.items():
    with pytest.raises(UserError, match=f"--out=.*{out}.*{message}"):
      command._check_out(str(tmp_path / out), [text, f"{text}/a.txt"])
  with pytest.raises(UserError, match="names several columns; allowed: files of tables"):
    command._sources(text, "en,de", False)
  command._check_out(str(tmp_path / "vocab.txt"), [text])
