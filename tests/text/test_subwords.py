"""Byte pairs: texts come back as they were; files of vocabularies; the command that trains one."""

import gzip
import json
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from mixer_jax.text import sample
from mixer_jax.text.documents import documents
from mixer_jax.text.subwords import Subwords
from tests.text.test_vocabulary import ODD

ROOT = pathlib.Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def texts():
  return list(documents(str(sample.SPLITS["dev"]), sample.TEXT))


@pytest.fixture(scope="module")
def vocabulary(texts):
  return Subwords.train(texts, 600)


def test_texts_come_back_as_they_were(vocabulary, texts):
  odd = [*ODD, " both ends ", "</s> <pad><s>", "two  spaces", "\ufeffmark", "line\nand\r\nline"]
  found = vocabulary.encode([*odd, *texts])
  assert [vocabulary.decode(ids) for ids in found] == [*odd, *texts]
  special = {vocabulary.pad, vocabulary.bos, vocabulary.eos}
  assert not special & {int(i) for ids in found for i in ids}
  for ids, text in zip(found[: len(odd)], odd):
    assert ids.dtype == np.int32 and len(ids) <= len(text.encode())
  for a, b in zip(found, vocabulary.encode([*odd, *texts], parallel=True)):
    np.testing.assert_array_equal(a, b)


def test_pairs_are_merged_in_the_order_of_the_file(vocabulary, texts):
  """Sennrich et al. (2016), Algorithm 1: merges act one after the other, within words."""
  model = json.loads(vocabulary._content)["model"]
  ids, merges = model["vocab"], [tuple(pair) for pair in model["merges"]]
  as_char = dict(zip(_bytes_of_gpt2().values(), _bytes_of_gpt2()))

  def encoded(word):
    parts = [as_char[byte] for byte in word.encode()]
    for a, b in merges:
      i = 0
      while i < len(parts) - 1:
        parts[i : i + 2] = [a + b] if (parts[i], parts[i + 1]) == (a, b) else parts[i : i + 2]
        i += 1
    return [ids[part] for part in parts]

  for text in texts[:40]:
    plain = re.sub("[^a-z ]", "", text).strip()
    words = re.findall(" ?[a-z]+", re.sub(" +", " ", plain))
    expected = [i for word in words for i in encoded(word)]
    assert vocabulary.encode(["".join(words)])[0].tolist() == expected
  assert vocabulary.size == len(ids) == 600 == 3 + 256 + len(merges)


def _bytes_of_gpt2():
  """The character that stands for each byte: itself if it can be seen, else one from 256 on."""
  seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
  hidden = [byte for byte in range(256) if byte not in seen]
  return {chr(b): b for b in seen} | {chr(256 + i): b for i, b in enumerate(hidden)}


def test_decoding_ends_at_the_end(vocabulary):
  [ids] = vocabulary.encode(["a film"])
  own = [vocabulary.bos, *ids, vocabulary.pad, vocabulary.eos, *ids]
  assert vocabulary.decode(own) == "a film"
  assert vocabulary.tokens([vocabulary.bos, *ids])[0] == "<s>"
  assert "".join(vocabulary.tokens(ids)) == "a film"


def test_training_and_files_are_the_same_each_time(vocabulary, texts, tmp_path):
  again = Subwords.train(iter(texts), 600)
  assert again.fingerprint() == vocabulary.fingerprint()
  again.save(tmp_path / "bpe.json")
  read = Subwords.read(tmp_path / "bpe.json")
  assert read.fingerprint() == vocabulary.fingerprint() and read.size == 600
  [a], [b] = (x.encode(["Ein Film </s>"]) for x in (read, vocabulary))
  np.testing.assert_array_equal(a, b)


@pytest.mark.thorough
def test_the_command_reads_aligned_files_and_columns(tmp_path):
  (tmp_path / "train.en").write_text("a man\na dog\n\n")
  (tmp_path / "train.de.gz").write_bytes(gzip.compress(b"ein Mann\nein Hund\n\n"))
  (tmp_path / "all.tsv").write_text("en\tde\na man\tein Mann\na dog\tein Hund\n")
  command = [sys.executable, "-m", "mixer_jax.text", "--kind=bpe", "--size=280"]
  made = {}
  for name, args in {
    "files": ["train.en", "train.de.gz"],
    "table": ["--field=en,de", "all.tsv"],
  }.items():
    done = subprocess.run(
      [*command, f"--out={tmp_path / name}", *args],
      capture_output=True,
      text=True,
      cwd=tmp_path,
      env={"PYTHONPATH": str(ROOT), "PATH": ""},
      timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "entries from 8 words in" in done.stdout
    made[name] = Subwords.read(tmp_path / name).fingerprint()
  assert made["files"] == made["table"]
