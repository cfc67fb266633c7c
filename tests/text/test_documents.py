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
from mixer_jax.text.records import rows

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
    assert table.places[2] == f"{path}: line {3 if kind == '.jsonl' else 4}"


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
  with pytest.raises(UserError, match="line 100001 is not UTF-8"):
    list(found)


def test_pairs_and_quoting(tmp_path):
  (tmp_path / "a.tsv").write_text('x\tb\ta\n"p\tp b\tp a"\nn\tn b\tn a\n')
  table = rows(str(tmp_path / "a.tsv"), "a", "b", "x")
  assert table[:3] == (['p a"', "n a"], ["p b", "n b"], ['"p', "n"])
  (tmp_path / "a.csv").write_text('a,x\n"two\nlines, ""quoted""",1\nb,2\n')
  table = rows(str(tmp_path / "a.csv"), "a", label="x")
  assert table.texts == ['two\nlines, "quoted"', "b"] and table.places[1].endswith("line 4")
  assert rows(str(tmp_path / "a.csv"), "a", label="").labels is None


def test_separators_within_a_line_stay(tmp_path):
  (tmp_path / "a.txt").write_bytes(b"a film\rof old\nit is good\r\n")
  assert list(documents(str(tmp_path / "a.txt"))) == ["a film\rof old", "it is good"]


def test_empty_files_of_a_folder_are_told(tmp_path, caplog):
  for name, content in (("a.txt", " \n"), ("b.txt", "a film\n"), ("d.tsv", "text\n")):
    (tmp_path / name).write_text(content)
  assert list(documents(str(tmp_path))) == ["a film"]
  assert f"{tmp_path}: 2 of 3 files are empty, such as {tmp_path}/a.txt" in caplog.text


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
        each = {"premise": f"crème {i}", "other": f"other {i}", "label": (label and -1) or i % 2}
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
  assert table.class_names == ("entailment", "neutral")
  assert list(found) == table.texts
  for text, other, label in zip(table.texts, table.pairs, table.labels, strict=True):
    i = int(text[-1])
    assert (other, label) == (f"other {i}", ["entailment", "neutral"][i % 2])
  assert rows("text_pairs", "premise", label="", **test).labels is None
  cases = {
    "record 0 of 'test': label is -1: this split has no labels": ("premise", "", "label", "test"),
    "needs the features text: Text, label: .*, but has .*premise: Text": ("text", "", "label"),
    "needs the features premise: Text, y: ": ("premise", "", "y"),
    "Unknown split 'dev'": ("premise", "", "label", "dev"),
  }
  for message, (*columns, split) in (
    (k, v if len(v) > 3 else (*v, "train")) for k, v in cases.items()
  ):
    with pytest.raises(UserError, match=message):
      rows("text_pairs", *columns, split, str(tmp_path))
  with pytest.raises(UserError, match="no such dataset in TFDS"):
    documents("text_pair", "premise", **where)


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
