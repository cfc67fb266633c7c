"""Aligned sentences of files, tables and TFDS, and their tokens; each mistake is one line."""

import gzip
import json
import lzma

import numpy as np
import pytest
import tensorflow_datasets as tfds

from mixer_jax.errors import UserError
from mixer_jax.text import sample
from mixer_jax.text.pairs import encode, pairs
from mixer_jax.text.subwords import Subwords
from tests.make_pairs_sample import make_pairs_sample

ENGLISH = ["a man .", "two dogs run", " A  \u2028 line", 'it is "good"']
GERMAN = ["ein Mann .", "zwei Hunde laufen", "eine Zeile ", "es ist gut"]
OWN = ("en", "de")


def written(folder, english=ENGLISH, german=GERMAN):
  (folder / "train.en").write_text("\n".join(english) + "\n")
  (folder / "train.de.gz").write_bytes(gzip.compress("\n".join(german).encode()))
  return str(folder / "train")


def stripped(texts):
  return [text.strip() for text in texts]


def test_files_and_tables_give_the_same_pairs(tmp_path):
  rows = list(zip(ENGLISH, GERMAN))
  lines = ["no\tde\ten", *(f"{i}\t{b}\t{a}" for i, (a, b) in enumerate(rows))]
  (tmp_path / "t.tsv.xz").write_bytes(lzma.compress("\n".join(lines).encode()))
  objects = (json.dumps({"en": a, "de": b}) for a, b in rows)
  (tmp_path / "t.jsonl").write_text("\n".join(objects))
  for path in (written(tmp_path), str(tmp_path / "t.tsv.xz"), str(tmp_path / "t.jsonl")):
    found = pairs(path, *OWN)
    assert (found.sources, found.targets) == (stripped(ENGLISH), stripped(GERMAN))
    assert not found.empty and not found.summary()
    back = pairs(path, "de", "en")
    assert (back.sources, back.targets) == (found.targets, found.sources)


def test_pairs_with_an_empty_line_are_left_out_and_counted(tmp_path):
  found = pairs(written(tmp_path, ["", "a", " ", "b"], ["x", "y", "", "z"]), *OWN)
  assert (found.sources, found.targets, found.empty) == (["a", "b"], ["y", "z"], 2)
  assert found.summary() == "2 of 4 pairs have an empty line and are left out"


def test_a_lone_surrogate_is_replaced(tmp_path):
  """JSON that was cut within an emoji has one."""
  table = tmp_path / "p.jsonl"
  table.write_text('{"en": "a \\ud83d b", "de": "ein Haus"}\n')
  found = pairs(str(table), "en", "de")
  assert found.sources == ["a ? b"] and encode(
    found, Subwords.train(["a ? b ein Haus"] * 9, 300), 64
  )


def test_tfds_by_name(tmp_path):
  class Translated(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Pairs as in WMT."""

    __module__ = "tests.translated"
    name = "translated"
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
      features = tfds.features.Translation(languages=OWN)
      return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
      return {"train": ((i, dict(zip(OWN, each))) for i, each in enumerate(zip(ENGLISH, GERMAN)))}

    def _generate_examples(self):
      raise NotImplementedError

  tfds.disable_progress_bar()
  Translated(data_dir=str(tmp_path), file_format="array_record").download_and_prepare()
  found = pairs("translated", *OWN, split="train", data_dir=str(tmp_path))
  assert sorted(zip(found.sources, found.targets)) == sorted(
    zip(stripped(ENGLISH), stripped(GERMAN))
  )


def test_the_sample_is_what_its_grammar_writes(tmp_path):
  make_pairs_sample(tmp_path)
  found = {split: pairs(str(path), *OWN) for split, path in sample.PAIRS.items()}
  readme = (sample.DIRECTORY / "README.md").read_text()
  for split, own in found.items():
    written_now = pairs(str(tmp_path / sample.PAIRS[split].name), *OWN)
    assert (own.sources, own.targets) == (written_now.sources, written_now.targets)
    assert f"{len(own.sources):,} pairs" in readme
  sentences = [text for own in found.values() for text in own.sources]
  assert len(set(sentences)) == len(sentences) == 3400
  made = Subwords.read(tmp_path / sample.PAIRS_VOCABULARY.name)
  assert made.fingerprint() == Subwords.read(sample.PAIRS_VOCABULARY).fingerprint()


@pytest.fixture(scope="module")
def vocabulary():
  return Subwords.train(ENGLISH * 3 + GERMAN * 3, 400)


def test_sentences_are_padded_after_their_end(vocabulary, tmp_path):
  found = pairs(written(tmp_path), *OWN)
  arrays = encode(found, vocabulary, 12).arrays
  for side, texts in (("source", found.sources), ("target", found.targets)):
    for ids, length, text in zip(arrays[side], arrays[f"{side}_length"], texts, strict=True):
      assert ids[length - 1] == vocabulary.eos and (ids[length:] == vocabulary.pad).all()
      assert vocabulary.decode(ids) == text
  assert not arrays["cut"].any() and not encode(found, vocabulary, 12).summary(12, True)


def test_long_sentences_lose_their_end_and_are_counted(vocabulary, tmp_path):
  found = pairs(written(tmp_path), *OWN)
  whole, short = encode(found, vocabulary, 40), encode(found, vocabulary, 4)
  longest = np.maximum(whole.arrays["source_length"], whole.arrays["target_length"])
  np.testing.assert_array_equal(short.arrays["cut"], longest > 4)
  for side in ("source", "target"):
    ids, length = short.arrays[side], short.arrays[f"{side}_length"]
    np.testing.assert_array_equal(length, np.minimum(whole.arrays[f"{side}_length"], 4))
    assert (np.take_along_axis(ids, length[:, None] - 1, 1) == vocabulary.eos).all()
  number = (longest > 4).sum()
  told = f"{number} of 4 pairs are longer than max_length=4 tokens and"
  assert short.summary(4, False) == f"{told} were cut"
  assert short.summary(4, True) == f"{told} are left out"


def test_a_language_that_the_vocabulary_does_not_know_is_refused(vocabulary, tmp_path):
  greek = ["ένας άνδρας", "δύο σκύλοι", "μια γραμμή", "είναι καλό"]
  found = pairs(written(tmp_path, german=greek), *OWN)
  with pytest.raises(UserError, match="data.vocabulary has no words of the language 'de'"):
    encode(found, vocabulary, 40)
  encode(found, Subwords.train(ENGLISH, 259), 40)  # one of bytes knows no words at all
