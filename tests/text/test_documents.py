"""Documents and labelled rows of files, folders and TFDS; each mistake is one line."""

import csv
import gzip
import io
import json
import lzma

import pytest
import tensorflow_datasets as tfds

from mixer_jax.errors import UserError
from mixer_jax.text import sample
from mixer_jax.text.documents import documents, files
from mixer_jax.text.rows import rows

TEXTS = ["a film .", 'it is "good"', "crème brûlée", "x\u2028y"]
TSV = "label\tsentence\n" + "".join(f"{i}\t{x}\n" for i, x in enumerate(TEXTS))


def _csv():
  out = io.StringIO()
  csv.writer(out).writerows([["label", "sentence"], *enumerate(TEXTS)])
  return out.getvalue()


CONTENTS = {
  ".txt": "\n".join(TEXTS),
  ".tsv": TSV,
  ".csv": _csv(),
  ".jsonl": "".join(json.dumps({"label": i, "sentence": x}) + "\n" for i, x in enumerate(TEXTS)),
}


def _error(call, *args, **kwargs):
  with pytest.raises(UserError) as caught:
    call(*args, **kwargs)
  assert "\n" not in str(caught.value)
  return str(caught.value)


@pytest.mark.parametrize("pack", ["", ".gz", ".xz"])
@pytest.mark.parametrize("kind", CONTENTS)
def test_every_kind_of_file_gives_the_same_texts(kind, pack, tmp_path):
  path = tmp_path / f"a{kind}{pack}"
  compress = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}[pack]
  path.write_bytes(compress(b"\xef\xbb\xbf" + CONTENTS[kind].encode()))
  found = documents(str(path), "sentence")
  assert list(found) == list(found) == TEXTS
  if kind != ".txt":
    table = rows(str(path), "sentence")
    assert table.texts == TEXTS and table.labels == ["0", "1", "2", "3"] and table.pairs is None
    assert table.where(2) == f"{path}: line {3 if kind == '.jsonl' else 4}"


def test_a_folder_equals_one_file(tmp_path):
  texts = [f"document {i}" for i in range(40)]
  (tmp_path / "one.txt").write_text("\r\n".join(texts))
  root = tmp_path / "many"
  for i in range(4):
    (root / f"b{i}").mkdir(parents=True)
    for j in (1, 0):
      part = "\n\n".join(texts[10 * i + 5 * j : 10 * i + 5 * j + 5])
      (root / f"b{i}" / f"{j}.txt.gz").write_bytes(gzip.compress(part.encode(), mtime=0))
  (root / ".hidden.txt").write_text("no")
  (root / "notes.md").write_text("no")
  assert list(documents(str(root))) == list(documents(str(tmp_path / "one.txt"))) == texts


def test_links_to_folders_are_followed_and_circles_end(tmp_path):
  for name in ("texts", "elsewhere"):
    (tmp_path / name).mkdir()
    (tmp_path / name / "a.txt").write_text(name)
  (tmp_path / "texts" / "linked").symlink_to(tmp_path / "elsewhere")
  (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "texts")
  assert list(documents(str(tmp_path / "texts"))) == ["texts", "elsewhere"]


def test_a_link_to_a_hidden_folder_is_read_and_one_of_two_links(tmp_path):
  """A mounted volume may keep its files in a hidden folder that a link leads to."""
  (tmp_path / ".data").mkdir()
  (tmp_path / ".data" / "a.txt").write_text("text")
  for name in ("b", "a"):
    (tmp_path / name).symlink_to(tmp_path / ".data")
  assert files(str(tmp_path)) == [tmp_path / "a" / "a.txt"]


def test_a_changed_file_changes_the_fingerprint(tmp_path):
  path = tmp_path / "a.txt"
  path.write_text("one")
  before = documents(str(path)).fingerprint()
  assert documents(str(path)).fingerprint() == before
  assert documents(str(path), paragraphs=True).fingerprint() != before
  path.write_text("one two")
  assert documents(str(path)).fingerprint() != before


def test_paragraphs_join_lines(tmp_path):
  (tmp_path / "a.txt").write_text("\none\ntwo \n\n \nthree\n\n\nfour\nfive")
  found = documents(str(tmp_path / "a.txt"), paragraphs=True)
  assert list(found) == ["one two", "three", "four five"]


def test_reading_is_lazy(tmp_path):
  """The first document comes before the broken end of the file is met."""
  (tmp_path / "a.txt").write_bytes(b"one\n" * 100_000 + b"\xff\n")
  found = iter(documents(str(tmp_path / "a.txt")))
  assert next(found) == "one"
  assert "line 100001 is not UTF-8 (byte 1)" in _error(list, found)


def test_pairs_and_quoting(tmp_path):
  (tmp_path / "a.tsv").write_text('x\tb\ta\n"p\tp b\tp a"\nn\tn b\tn a\n')
  table = rows(str(tmp_path / "a.tsv"), "a", "b", "x")
  assert table[1:4] == (['p a"', "n a"], ["p b", "n b"], ['"p', "n"])
  (tmp_path / "a.csv").write_text('a,x\n"two\nlines, ""quoted""",1\nb,2\n')
  table = rows(str(tmp_path / "a.csv"), "a", label="x")
  assert table.texts == ['two\nlines, "quoted"', "b"] and table.places == [2, 4]
  assert rows(str(tmp_path / "a.csv"), "a", label="").labels is None


@pytest.mark.parametrize(
  "name, content, expected",
  [
    ("a.tsv", b"label\ttext\n0\tb\n", "line 2: no column 'sentence'; columns are 'label', 'text'"),
    ("a.tsv", b"label\tsentence\n0\tb\n1\n", "line 3: 1 fields, but the header has 2: 'label', "),
    ("a.tsv", b"label\tsentence\n0\t \n", "line 2: column 'sentence' is empty"),
    ("a.tsv", b"label\tlabel\n0\t1\n", "line 1: column 'label' stands twice in the header"),
    ("a.tsv", b"", "is empty; it needs at least one row"),
    ("a.tsv", b"label\tsentence\r0\tgood\r", r"a.tsv: its lines end in \r alone; allowed: \n, or"),
    ("a.csv", b"label,sentence\r0,good\r", r"a.csv: its lines end in \r alone"),
    ("a.tsv", b"label\tsentence\r0\tgood\r1\tbad\n", r"a.tsv: its lines end in \r alone"),
    ("a.csv", b"label,sentence\r0,good\r1,bad\n", r"a.csv: its lines end in \r alone"),
    (
      "a.jsonl",
      b'{"label": 1, "sentence": "a", "label": 0}\n',
      "the key 'label' stands twice in an",
    ),
    ("a.tsv", b"label\tsentence\n", "is empty; it needs at least one row"),
    ("a.tsv", b"label\tsentence\n0\ta\n0\tab\xff\n", "line 3 is not UTF-8 (byte 5)"),
    ("a.csv", b'label,sentence\n0,"a" b\n', "line 2: broken CSV"),
    ("a.csv", b'label,sentence\n0,a\n0,"a\n', "line 3: broken CSV: unexpected end of data"),
    ("a.jsonl", b'{"sentence": "a", "label": 0}\n{"sen\n', "line 2: broken JSON: Unterminated"),
    ("a.jsonl", b"[1]\n", "line 1: is a JSON list; allowed is an object"),
    ("a.jsonl", b'{"sentence": 3, "label": 0}\n', "line 1: column 'sentence' is int"),
    ("a.jsonl", b'{"sentence": "a", "label": null}\n', "line 1: column 'label' is null"),
    ("a.jsonl", b'{"label": 0}\n', "line 1: no column 'sentence'; columns are 'label'"),
    (
      "a.tsv.gz",
      gzip.compress(TSV.encode(), mtime=0)[:-9],
      "cannot be read: Compressed file ended",
    ),
    ("a.tsv.gz", TSV.encode(), "cannot be read: Not a gzipped file"),
    ("a.tsv.xz", TSV.encode(), "cannot be read: Input format not supported"),
    ("a.txt", b"text", "has no columns; allowed: .tsv, .csv, .jsonl"),
    ("a.pdf", b"text", "no known ending; allowed: .txt, .jsonl, .tsv, .csv, also with .gz or .xz"),
  ],
)
def test_bad_tables_are_a_line(name, content, expected, tmp_path):
  path = tmp_path / name
  path.write_bytes(content)
  line = _error(rows, str(path), "sentence")
  assert line.startswith(f"{path}: ") and expected in line


def test_bad_documents_are_a_line(tmp_path, caplog):
  (tmp_path / "a.txt").write_text(" \n\n")
  assert "a.txt: is empty; it needs" in _error(list, documents(str(tmp_path / "a.txt")))
  assert "a.txt: is empty; it needs" in _error(list, documents(str(tmp_path)))
  (tmp_path / "b.txt").write_text("a film\n")
  assert list(documents(str(tmp_path))) == ["a film"]
  assert f"{tmp_path}: 1 of 2 files are empty, such as {tmp_path}/a.txt" in caplog.text
  for name, content in (("c.jsonl", ""), ("d.tsv", "text\n"), ("e.csv", "")):
    (tmp_path / name).write_text(content)
    assert f"{name}: is empty; it needs" in _error(list, documents(str(tmp_path / name)))
  assert list(documents(str(tmp_path))) == ["a film"]
  assert f"{tmp_path}: 4 of 5 files are empty" in caplog.text
  assert "no such file or folder" in _error(documents, str(tmp_path / "none"))
  assert "no such file or folder" in _error(documents, "none.txt")
  assert "no such file or folder" in _error(documents, "")
  (tmp_path / "mac.txt").write_bytes(b"a film\rit is good\r")
  assert r"mac.txt: its lines end in \r alone" in _error(list, documents(str(tmp_path / "mac.txt")))
  for end in (b"\r\n", b"\rthe end"):  # the last line may have no end
    (tmp_path / "mac.txt").write_bytes(b"a film\rof old\nit is good" + end)
    last = "it is good" + end.decode().removesuffix("\r\n")
    assert list(documents(str(tmp_path / "mac.txt"))) == ["a film\rof old", last]
  (tmp_path / "mac.txt").write_bytes(b"a film\rof old")
  assert list(documents(str(tmp_path / "mac.txt"))) == ["a film\rof old"]
  (tmp_path / "empty").mkdir()
  assert "no text files in this folder" in _error(documents, str(tmp_path / "empty"))
  (tmp_path / "a.pdf").write_text("a")
  assert "no known ending" in _error(documents, str(tmp_path / "a.pdf"))
  assert "cannot be read: No such file" in _error(rows, str(tmp_path / "none.tsv"), "sentence")


def _prepare(tmp_path):
  """A set of sentence pairs; its test split has no labels."""

  class TextPairs(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Pairs of texts."""

    __module__ = "tests.text_pairs"
    name = "text_pairs"
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
      features = {
        "premise": tfds.features.Text(),
        "other": tfds.features.Text(),
        "label": tfds.features.ClassLabel(names=["entailment", "neutral"]),
      }
      return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
      return {"train": self._examples(0), "test": self._examples(-1)}

    def _generate_examples(self):
      raise NotImplementedError

    def _examples(self, label):
      for i in range(6):
        each = {"premise": f"crème {i}", "other": f"other {i}", "label": label and -1 or i % 2}
        yield i, each

  tfds.disable_progress_bar()
  TextPairs(data_dir=str(tmp_path), file_format="array_record").download_and_prepare()


def test_tfds_by_name(tmp_path):
  _prepare(tmp_path)
  where = dict(data_dir=str(tmp_path), split="train")
  test = where | dict(split="test")
  found = documents("text_pairs", "premise", **where)
  assert sorted(found) == [f"crème {i}" for i in range(6)]
  assert found.fingerprint() == documents("text_pairs", "premise", **where).fingerprint()
  assert found.fingerprint() != documents("text_pairs", "other", **where).fingerprint()
  table = rows("text_pairs:1.0.0", "premise", "other", **where)
  assert table.names == ("entailment", "neutral")
  assert list(found) == table.texts
  for text, other, label in zip(table.texts, table.pairs, table.labels, strict=True):
    i = int(text[-1])
    assert (other, label) == (f"other {i}", ["entailment", "neutral"][i % 2])
  assert rows("text_pairs", "premise", label="", **test).labels is None
  line = _error(rows, "text_pairs", "premise", **test)
  assert "record 0 of 'test': label is -1: this split has no labels" in line
  line = _error(rows, "text_pairs", "text", **where)
  assert "needs the feature text: Text, but has" in line and "premise: Text" in line
  assert "needs the feature label: Text" in _error(documents, "text_pairs", "label", **where)
  line = _error(rows, "text_pairs", "premise", label="y", **where)
  assert "has no feature 'y'; features are" in line
  assert "Unknown split 'dev'" in _error(
    documents, "text_pairs", "premise", **where | dict(split="dev")
  )
  line = _error(documents, "text_pair", others=("sample",), **where)
  assert "no such dataset in TFDS" in line and "sample, TFDS names" in line


def test_the_sample_is_as_its_readme_says():
  found = {split: rows(str(path), sample.TEXT) for split, path in sample.SPLITS.items()}
  counts = {split: (len(x.texts), x.labels.count("1")) for split, x in found.items()}
  assert counts == {"train": (6697, 3506), "dev": (872, 444), "test": (1821, 909)}
  readme = (sample.DIRECTORY / "README.md").read_text()
  assert all(
    f"{n:,} " in readme and f"{positive:,} positive" in readme.replace(" of them", "")
    for n, positive in counts.values()
  )
  assert {label for x in found.values() for label in x.labels} == {"0", "1"}
  assert not set(found["train"].texts) & {*found["dev"].texts, *found["test"].texts}
  assert min(len(text.split()) for text in found["train"].texts) >= 5
  assert sum(path.stat().st_size for path in sample.DIRECTORY.iterdir()) < 2**20
