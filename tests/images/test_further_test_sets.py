"""Further test sets: classes matched by name or number, sets of right classes."""

import json

import jax.numpy as jnp
import numpy as np
from PIL import Image
import pytest

from mixer_jax import config as config_lib
from mixer_jax import evaluate, probe, tasks
from mixer_jax.data import tfds_source
from mixer_jax.errors import UserError
from mixer_jax.images import further_test_sets, sources, tfds_images
from mixer_jax.training import loop
from tests.images.loading import config as image_config
from tests.images.loading import load, write


def options(root, **fields):
  return image_config(dir=str(root), cache_dir=str(root / "cache"), image_size=8, **fields)


@pytest.mark.parametrize("stream", ["never", "always"])
def test_numbered_folders_are_classes_by_their_number(twelve, tmp_path, stream):
  """Sorted as texts "10" comes before "2"."""
  v2 = write(tmp_path / "v2", {f"{i}/x.png": 10 * i for i in (0, 2, 10, 11)})
  data = options(twelve, test_sets=f"v2={v2}", stream=stream)
  split = sources.load(data).splits["v2"]
  examples = [split.read(i, None) for i in range(4)] if stream == "always" else None
  arrays = split.arrays() or {k: np.stack([e[k] for e in examples]) for k in ("image", "label")}
  assert split.spec["label"].shape == () and len(split) == 4
  np.testing.assert_array_equal(10 * arrays["label"], arrays["image"][:, 0, 0, 0])


def test_names_match_whatever_their_order_and_other_sizes_are_cut(twelve, tmp_path):
  other = write(tmp_path / "other", {"c11/a.png": 110, "c02/b.png": 20})
  Image.fromarray(np.full((20, 30, 3), 50, np.uint8)).save(other / "c02" / "large.png")
  data = options(twelve, test_sets=f"other={other}", fit="crop")
  arrays = load(data).splits["other"].arrays()
  assert dict(zip(arrays["image"][:, 0, 0, 0], arrays["label"])) == {110: 11, 20: 2, 50: 2}
  npz = {"test_images": np.zeros((2, 8, 8, 3), np.uint8), "test_labels": np.array([1, 0])}
  np.savez(tmp_path / "a.npz", class_names=["c07", "c05"], **npz)
  found = load(options(twelve, test_sets=f"a={tmp_path}/a.npz")).splits["a"].arrays()
  assert found["label"].tolist() == [5, 7]


def test_a_class_folder_without_images_is_a_warning(twelve, tmp_path, caplog):
  other = write(tmp_path / "other", {"c11/a.png": 110})
  (other / "c02").mkdir()
  arrays = load(options(twelve, test_sets=f"other={other}")).splits["other"].arrays()
  assert arrays["label"].tolist() == [11]
  assert "other/c02: no images in this class folder" in caplog.text


def test_sets_of_classes_by_the_number_of_the_file_or_its_path(twelve, tmp_path):
  names = {f"ILSVRC2012_val_{i:08d}.png": i for i in (1, 2, 4)}
  flat = write(tmp_path / "flat", names)
  nested = write(tmp_path / "nested", {f"c0{i}/{name}": i for name, i in names.items()})
  lists = [[3, "c01"], [], [7], [11]]
  (tmp_path / "real.json").write_text(json.dumps(lists))
  keyed = {name: lists[i - 1] for name, i in names.items()}
  keyed["c04/ILSVRC2012_val_00000004.png"] = ["c05"]  # a path says more than a name
  (tmp_path / "keyed.json").write_text(json.dumps(keyed))
  expected = {1: {1, 3}, 2: set(), 4: {11}}
  cases = ((flat, "real", {}), (nested, "real", {}), (nested, "keyed", {4: {5}}))
  for stream in ("never", "always"):
    for place, file, other in cases:
      own = dict(test_sets=f"x={place}", test_labels=f"x={tmp_path}/{file}.json", stream=stream)
      split = sources.load(options(twelve, **own)).splits["x"]
      assert (split.spec["label"].shape, split.spec["label"].dtype) == ((12,), bool)
      rows = split.arrays() or [split.read(i, None) for i in range(3)]
      if isinstance(rows, dict):
        rows = [dict(image=x, label=y) for x, y in zip(rows["image"], rows["label"])]
      pairs = ((row["image"], row["label"]) for row in rows)
      found = {int(x[0, 0, 0]): set(np.flatnonzero(label)) for x, label in pairs}
      assert found == expected | other


def test_a_name_of_several_files_is_no_place_for_labels(twelve, tmp_path):
  other = write(tmp_path / "other", {"c01/0.png": 1, "c02/0.png": 2})
  own = dict(test_sets=f"x={other}", test_labels=f"x={tmp_path}/x.json")
  (tmp_path / "x.json").write_text(json.dumps({"0.png": ["c03"]}))
  with pytest.raises(UserError, match="'0.png' is the name of c0[12]/0.png and of c0[12]/0.png"):
    load(options(twelve, **own))
  (tmp_path / "x.json").write_text(json.dumps({"c01/0.png": ["c01"], "0.png": ["c03"]}))
  found = load(options(twelve, **own)).splits["x"].arrays()["label"]
  assert sorted(np.flatnonzero(found.any(axis=0)).tolist()) == [1, 3]


def test_a_training_set_of_numbers_is_matched_by_name(tmp_path):
  """Its classes are sorted as texts, so that "10" is the third class."""
  data = write(
    tmp_path / "data", {f"{s}/{i}/a.png": i for i in range(12) for s in ("train", "test")}
  )
  own = write(tmp_path / "own", {"10/a.png": 10, "2/a.png": 2})
  found = load(options(data, test_sets=f"own={own}"))
  arrays = found.splits["own"].arrays()
  names = [found.class_names[i] for i in arrays["label"]]
  assert names == [str(x[0, 0, 0]) for x in arrays["image"]]


def test_numbers_that_are_names_of_the_training_match_by_name():
  """One class that is no number does not make them places."""
  known = ("1", "2", "3", "unknown")
  assert further_test_sets.class_numbers("x", ["1", "2", "3"], known).tolist() == [0, 1, 2]
  assert further_test_sets.class_numbers("x", ["0", "2"], known).tolist() == [0, 2]


def test_tfds_sets_of_several_labels_and_of_floats(monkeypatch):
  import tensorflow_datasets as tfds

  several = tfds.features.Sequence(tfds.features.ClassLabel(names=["b", "a"]))
  features = {"image": tfds.features.Image(), "label": several}
  monkeypatch.setattr(tfds_source, "find", lambda name, root, check, *_: (root, check(features)))
  monkeypatch.setattr(tfds_source.Examples, "_open", lambda self: None)
  example = {"image": b"", "label": [1, 0]}
  monkeypatch.setattr(tfds_source.Examples, "read", lambda self, i: example)
  records, sets = further_test_sets.open_set("x", "tfds:several", "", ("a", "b", "c"), "")
  assert sets and records.read(0)[1].tolist() == [True, True, False]
  features["image"] = tfds.features.Image(shape=(8, 8, 1), dtype=np.float32)
  with pytest.raises(UserError, match="feature image holds .*float32.*; allowed: uint8 or uint16"):
    further_test_sets.open_set("x", "tfds:several", "", ("a", "b", "c"), "")
  features["label"] = several.feature
  with pytest.raises(UserError, match="feature image holds"):
    tfds_images._class_names("x", tfds.features.FeaturesDict(features))


@pytest.mark.thorough
def test_tfds_sets_by_names_by_real_labels_and_by_the_number_of_the_file(tmp_path, monkeypatch):
  import tensorflow_datasets as tfds

  again = f"again=tfds:{sources.SAMPLE_NAME}@test"
  splits = sources.load(
    image_config(name=sources.SAMPLE_NAME, dir=str(sources.SAMPLE_DIR), test_sets=again)
  ).splits
  for name, array in splits["again"].arrays().items():
    np.testing.assert_array_equal(array, splits["test"].arrays()[name])

  one = tfds.features.ClassLabel(names=["b", "a"])
  features = {"image": tfds.features.Image(), "file_name": tfds.features.Text()}
  features |= {"original_label": one, "real_label": tfds.features.Sequence(one)}
  examples = [
    dict(
      image=b"", file_name=f"ILSVRC2012_val_{n:08d}.JPEG".encode(), real_label=np.array(own, int)
    )
    for n, own in ((3, [0]), (1, []), (2, [1, 0]))
  ]
  monkeypatch.setattr(tfds_source, "find", lambda name, root, check, *_: (root, check(features)))
  monkeypatch.setattr(tfds_source.Examples, "_open", lambda self: None)
  monkeypatch.setattr(tfds_source.Examples, "read", lambda self, i: examples[i])
  monkeypatch.setattr(tfds_source.Examples, "fingerprint", lambda self: "")
  known = ("a", "b", "c")
  records, sets = further_test_sets.open_set("real", "tfds:real@validation", "", known, "")
  assert sets and [np.flatnonzero(records.read(i)[1]).tolist() for i in range(3)] == [
    [1],
    [],
    [0, 1],
  ]
  (tmp_path / "real.json").write_text('[["c"], [0], []]')
  other, _ = further_test_sets.open_set("real", "tfds:real", str(tmp_path / "real.json"), known, "")
  assert [np.flatnonzero(other.read(i)[1]).tolist() for i in range(3)] == [[], [2], [0]]
  assert records.fingerprint() != other.fingerprint()
  del features["file_name"]
  with pytest.raises(UserError, match="has no feature file_name"):
    further_test_sets.open_set("real", "tfds:real", str(tmp_path / "real.json"), known, "")


def test_accuracy_on_sets_is_that_of_a_loop():
  task = tasks.find("image_classification")(config_lib.default())
  rng = np.random.default_rng(0)
  logits = rng.normal(size=(50, 6)).astype(np.float32)
  logits[7] = np.nan
  sets = rng.random((50, 6)) < 0.3
  sets[::5] = False
  mask = rng.random(50) < 0.8
  task.predict = lambda variables, batch: (jnp.array(logits), jnp.array(sets), None, None)
  found = task.evaluate(None, None, jnp.array(mask))
  hits = count = 0
  for row, right, counts in zip(logits, sets, mask):
    if counts and right.any():
      count += 1
      hits += int(not np.isnan(row).any() and right[int(np.argmax(row))])
  assert found.keys() == {"top1"} and 20 < count < 40
  assert (float(found["top1"].total), float(found["top1"].weight)) == (hits, count)


@pytest.mark.thorough
def test_a_run_is_tested_on_them_by_its_config_and_afterwards(tiny_config, shapes_npz, tmp_path):
  """With the set of the own label the accuracy is that of the test split."""
  config = tiny_config
  config.model.num_blocks, config.num_steps = 1, 5
  sets = [[int(label)] for label in np.load(shapes_npz)["test_labels"]]
  (tmp_path / "own.json").write_text(json.dumps(sets))
  further = dict(
    test_sets=f"again={shapes_npz},sets={shapes_npz}", test_labels=f"sets={tmp_path}/own.json"
  )
  config.data.update(further)
  directory = loop.train(config, str(tmp_path / "run"))
  found = evaluate.evaluate(str(directory))
  assert found["again"] == found["test"] and found["sets"] == {"top1": found["test"]["top1"]}
  with pytest.raises(UserError, match="split 'sets' has sets of classes; probes take one class"):
    probe.probe(str(directory), split="sets")
  config.data.update(test_sets="", test_labels="")
  loop.train(config, str(directory))  # they do not matter to a run that goes on
  further["test_sets"] = f"sets={shapes_npz}"
  assert evaluate.evaluate(str(directory), **further).keys() == {"test", "sets"}
