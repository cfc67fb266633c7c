"""TFRecord files against two other writers: tensorboardX's, and TFDS's own of examples."""

import json
import pathlib
import shutil

import numpy as np
import pytest
from tensorboardX import crc32c as reference
from tensorboardX.record_writer import RecordWriter, masked_crc32c
from tensorflow_datasets.proto import tf_example_pb2

from mixer_jax.data import tfrecord
from mixer_jax.images.sources import SAMPLE_DIR, SAMPLE_NAME
from tests.images import loading
from tests.images.loading import error, load

RECORDS = [b"", b"a", bytes(range(256)) * 50, b"\x00" * 4096, b"end"]


def write(path, records):
  writer = RecordWriter(str(path))
  for record in records:
    writer.write(record)
  writer.close()


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 8, 4095, 4096, 4097, 9001])
def test_checksums_are_those_of_another_program(size):
  content = np.random.default_rng(size).bytes(size)
  assert tfrecord.masked_crc(content) == masked_crc32c(content).to_bytes(4, "little")
  assert reference.crc32c(b"123456789") == 0xE3069283  # RFC 3720's check value


def test_records_of_several_files_come_in_their_order(tmp_path):
  write(tmp_path / "a", RECORDS[:2])
  write(tmp_path / "b", [])
  write(tmp_path / "c", RECORDS[2:])
  records = tfrecord.TfRecords([tmp_path / name for name in "abc"], [2, 0, 3])
  assert len(records) == 5 and [records[i] for i in range(5)] == RECORDS


@pytest.mark.parametrize(
  "spoil, message",
  [
    (lambda x: x[:-1], r"it has 16,9\d\d bytes, and 5 records of 5 end at byte 16,9\d\d"),
    (lambda x: x[:5], "damaged at byte 0 of 5"),
    (lambda x: x[:16], "it has 16 bytes, and 1 records of 5"),
    (lambda x: x[:17] + b"\xff" + x[18:], "damaged at byte 16 of"),
    (lambda x: b"hello, this is a text", "no TFRecord file"),
    (lambda x: x[:28] + b"b" + x[29:], "content of a record is damaged"),
  ],
)
def test_damage_is_told(tmp_path, spoil, message):
  write(tmp_path / "a", RECORDS)
  (tmp_path / "a").write_bytes(spoil((tmp_path / "a").read_bytes()))
  with pytest.raises(ValueError, match=message) as info:
    records = tfrecord.TfRecords([tmp_path / "a"], [5])
    for i in range(5):
      assert records[i] == RECORDS[i]
  assert str(tmp_path / "a") in str(info.value)


@pytest.fixture
def prepared(tmp_path):
  """The test split of the sample as TFRecord in two files, in the form in which TFDS has it."""
  source = SAMPLE_DIR / SAMPLE_NAME / "1.0.0"
  target = tmp_path / SAMPLE_NAME / "1.0.0"
  shutil.copytree(source, target, ignore=shutil.ignore_patterns("*array_record*"))
  split = load(loading.config(name="sample", cache_dir=str(tmp_path / "cache"), train_split="test"))
  from array_record.python import array_record_module as array_record

  reader = array_record.ArrayRecordReader(str(next(source.glob("*-test.array_record*"))))
  examples = reader.read_all()
  found = tf_example_pb2.Example.FromString(examples[3]).features.feature
  assert set(found) == {"image", "label"}
  info = json.loads((target / "dataset_info.json").read_text())
  info["fileFormat"] = "tfrecord"
  info["splits"] = [s for s in info["splits"] if s["name"] == "test"]
  info["splits"][0]["shardLengths"] = ["600", "400"]
  (target / "dataset_info.json").write_text(json.dumps(info))
  for i, part in enumerate((examples[:600], examples[600:])):
    write(target / f"{SAMPLE_NAME}-test.tfrecord-0000{i}-of-00002", part)
  return tmp_path, split


def _config(root: pathlib.Path, **fields):
  own = dict(name=SAMPLE_NAME, dir=str(root), cache_dir=str(root / "other_cache"))
  return loading.config(**own | dict(train_split="test") | fields)


def test_a_prepared_directory_is_the_set_in_tfds_order(prepared):
  root, expected = prepared
  found = load(_config(root))
  assert found.class_names == expected.class_names
  np.testing.assert_array_equal(found.train.images, expected.train.images)
  np.testing.assert_array_equal(found.train.labels, expected.train.labels)
  streamed = load(_config(root, stream="always")).splits["test"]
  example = streamed.read(700, np.random.default_rng(0))
  np.testing.assert_array_equal(example["image"], expected.train.images[700])
  assert example["label"] == expected.train.labels[700]


def test_a_truncated_prepared_directory_names_file_and_sizes(prepared):
  root, _ = prepared
  path = next(root.rglob("*tfrecord-00001*"))
  size = path.stat().st_size
  path.write_bytes(path.read_bytes()[:-100])
  line = error(_config(root))
  assert path.name in line and f"has {size - 100:,} bytes" in line and f"byte {size:,}" in line
