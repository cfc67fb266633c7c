"""Classification of text: GLUE's scores, pairs, encoders from other runs, frozen ones."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixer_jax import experiment, models, tasks
from mixer_jax.errors import UserError
from mixer_jax.optim import Curvature
from mixer_jax.rundir import metrics_file
from mixer_jax.tasks.text import encoders
from mixer_jax.tasks.text_classification import scores
from mixer_jax.training import contract, restore
from mixer_jax.training.evaluator import Evaluator
from tests import children
from tests.pretrained.test_bert import Peer as Bert
from tests.tasks import runs
from tests.tasks.runs import shaken
from tests.tasks.text.conftest import sentences


@pytest.fixture
def config(config_of):
  return config_of("text_classification")


@pytest.mark.thorough
def test_settings_of_jax_change_no_dropout(config_of):
  runs.assert_settings_change_no_draw(config_of("text_classification", "bert_tiny"))


def test_scores_of_two_classes():
  rng = np.random.default_rng(0)
  true, found, mask = rng.uniform(size=(3, 60)) < np.array([0.3, 0.4, 0.8])[:, None]
  halves = [scores.of_two(found[i::2], true[i::2], mask[i::2]) for i in range(2)]
  total = {k: float(halves[0][k].merge(halves[1][k]).value()) for k in halves[0]}
  true, found = true[mask], found[mask]
  precision, recall = np.mean(true[found]), np.mean(found[true])
  np.testing.assert_allclose(total["f1"], 2 * precision * recall / (precision + recall), rtol=1e-6)
  np.testing.assert_allclose(total["matthews"], np.corrcoef(true, found)[0, 1], rtol=1e-5)
  nothing = scores.of_two(np.zeros(4, bool), np.zeros(4, bool), np.ones(4, bool))
  assert [float(x.value()) for x in nothing.values()] == [0.0, 0.0]


def test_padding_has_no_weight_in_any_metric(config):
  """Or no run would start."""
  contract.check_task(experiment.build(config))


@pytest.mark.thorough
def test_a_run_learns_and_answers_without_its_data(config, folder, tmp_path):
  config.data.dir = str(shutil.copytree(folder, tmp_path / "data"))
  config.num_epochs = config.eval_epochs = 10
  config.data.extra_test_splits = "more.tsv"
  children.trained(config, tmp_path / "run")
  row = metrics_file.read(tmp_path / "run")[-1]
  assert row["test/accuracy"] > 0.95 and row["more.tsv/f1"] > 0.9
  shutil.rmtree(tmp_path / "data")
  found = children.command(
    tmp_path / "log", "predict", f"--workdir={tmp_path / 'run'}", "the plot was good", "so flat"
  )
  answers = [json.loads(line) for line in found.out.splitlines() if line.startswith("{")]
  assert [answer["class"] for answer in answers] == ["positive", "negative"]
  wrong = children.command(tmp_path / "log", "predict", f"--workdir={tmp_path / 'run'}", "a\tb")
  assert "allowed: a sentence, without a tab" in wrong.error


@pytest.mark.thorough
def test_it_starts_from_a_language_model(config_of, tmp_path):
  """Whose sequences are longer, and which is gone when the run is resumed."""
  donor = config_of("masked_lm", field="sentence", max_length=24)
  donor.num_epochs = 1
  children.trained(donor, tmp_path / "donor")
  config = config_of("text_classification")
  config.pretrained = str(tmp_path / "donor")
  config.data.vocabulary = ""
  config.model.update(num_blocks=None, hidden_dim=None, ffn_dim=None)
  config.num_epochs = 1
  children.trained(config, tmp_path / "run")
  stored, _ = restore.stored(str(tmp_path / "run"))
  assert (stored.model.hidden_dim, stored.model.ffn_dim) == (16, 16)
  task = tasks.find("text_classification")(stored)
  shapes = jax.eval_shape(task.init, jax.random.key(0))
  start = task.initial(shapes, restore.stored)["params"]["encoder"]
  given = restore.stored(str(tmp_path / "donor"))[1]["params"]["encoder"]
  np.testing.assert_array_equal(start["words"]["embedding"], given["words"]["embedding"])
  kernel = lambda tree: tree["GmlpBlock_0"]["spatial_gating"]["Dense_0"]["kernel"]
  np.testing.assert_array_equal(kernel(start), kernel(given)[:16, :16])
  shutil.rmtree(tmp_path / "donor")
  again = children.Child(config, tmp_path / "run")
  assert again.wait() == 0, again.err


def of_fine_tuned(config_of, directory, labels, **fields):
  """A task that starts from a fine-tuned BERT, its variables, and the BERT."""
  peer = Bert(directory, "hf_bert_classifier")
  rows = [f"{label}\tone\tother" for label in labels * 24]
  (directory / "train.tsv").write_text("\n".join(["label\tone\tother", *rows]) + "\n")
  special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "one", "other"]
  entries = special + [f"w{i}" for i in range(50 - len(special))]
  (directory / "vocab.txt").write_text("\n".join(entries) + "\n")
  config = config_of("text_classification", "bert_base", text="one", pair="other", max_length=9)
  config.pretrained, config.pooling = str(peer.path), "pooler"
  config.data.update(dir=str(directory), vocabulary=str(directory / "vocab.txt"))
  config.data.update(train_split="train.tsv[:32]", test_split="train.tsv[32:]")
  config.update(fields)
  config.model.update(num_blocks=None, hidden_dim=None, ffn_dim=None)
  task_type = tasks.find("text_classification")
  task = task_type(task_type.complete(config))
  shapes = jax.eval_shape(task.init, jax.random.key(0))
  return task, task.initial(shapes, restore.stored), peer


def test_a_fine_tuned_bert_answers_as_in_transformers(config_of, tmp_path):
  """Its classes are those of the data by name: maybe, no, yes."""
  task, variables, peer = of_fine_tuned(config_of, tmp_path, ["no", "maybe", "Yes"])
  ids, real, segments = peer.inputs
  found = jax.jit(task.predict)(variables, {"ids": ids, "real": real, "segments": segments})
  place = [("yes", "no", "maybe").index(name.lower()) for name in task.class_names]
  np.testing.assert_allclose(found.outputs, peer.logits[:, place], rtol=1e-5, atol=1e-5)


def test_the_head_of_a_fine_tuned_bert_elsewhere(config_of, tmp_path, caplog):
  """Numbers are taken in their order; other names, numbers of classes and poolings take no head."""
  kernel = lambda found: np.asarray(found[1]["params"]["head"]["kernel"])
  numbered = of_fine_tuned(config_of, tmp_path, ["0", "1", "2"])
  own = numbered[2].arrays["classifier.weight"].T
  np.testing.assert_array_equal(kernel(numbered), own)
  with caplog.at_level("INFO"):
    for labels in (["no", "yes"], ["a", "b", "c"]):
      caplog.clear()
      found = of_fine_tuned(config_of, tmp_path, labels)
      assert not kernel(found).any() and "left out its classifier" in caplog.text
      pooler = found[1]["params"]["pooler"]["kernel"]
      np.testing.assert_array_equal(pooler, found[2].arrays["bert.pooler.dense.weight"].T)
    caplog.clear()
    found = of_fine_tuned(config_of, tmp_path, ["0", "1", "2"], pooling="first")
    assert not kernel(found).any() and "left out pooler and classifier" in caplog.text


@pytest.mark.thorough
def test_a_frozen_encoder_stays_and_is_kept_with_the_run(config_of, tmp_path):
  donor = config_of("masked_lm", field="sentence")
  donor.num_epochs = 1
  children.trained(donor, tmp_path / "donor")
  given = restore.stored(str(tmp_path / "donor"))[1]["params"]["encoder"]
  config = config_of("text_classification")
  config.frozen_from = str(tmp_path / "donor")
  config.optimizer.name = "kfac_adam"
  config.num_epochs = 1
  children.trained(config, tmp_path / "run")
  shutil.rmtree(tmp_path / "donor")
  _stored, variables = restore.stored(str(tmp_path / "run"))
  jax.tree.map(np.testing.assert_array_equal, dict(variables["frozen"]), dict(given))
  assert "words" not in variables["params"]["encoder"]
  found = children.command(tmp_path / "log", "evaluate", f"--workdir={tmp_path / 'run'}")
  assert found.code == 0, found.err
  row = metrics_file.read(tmp_path / "run")[-1]
  assert f"accuracy {row['test/accuracy']:.6g}" in found.out


@pytest.mark.thorough
def test_other_forms_of_a_trained_encoder(config_of):
  """Scanned blocks, a segment that only the donor knows; attention; more blocks are refused."""

  def built(**fields):
    make = dict(vocab_size=20, max_length=16, hidden_dim=8, ffn_dim=16, num_blocks=2)
    return models.encoder("gmlp_text_small", **make | fields)

  ids = np.random.default_rng(0).integers(0, 20, (3, 16)).astype(np.int32)
  real = ids > 1
  donor = built(segments=2)
  params = jax.jit(donor.init)(jax.random.key(0), ids, real)["params"]
  expected = donor.apply({"params": params}, ids, real)
  own = built(scan_blocks=True)
  fresh = {"encoder": jax.jit(own.init)(jax.random.key(1), ids, real)["params"], "head": {}}
  start = encoders.started(fresh, {"encoder": params}, None, "donor")
  found = own.apply({"params": start["encoder"]}, ids, real)
  np.testing.assert_allclose(found[real], expected[real], rtol=1e-4, atol=1e-5)
  shallow = {"encoder": jax.jit(built(num_blocks=1).init)(jax.random.key(1), ids, real)["params"]}
  with pytest.raises(UserError, match="donor does not fit the model: left over are GmlpBlock_1"):
    encoders.started(shallow, {"encoder": params}, None, "donor")


@pytest.mark.thorough
def test_pairs_are_told_apart_by_segments(config_of):
  config = config_of("text_classification", text="one", pair="other")
  config.data.update(train_split="train_pairs.tsv", test_split="test_pairs.tsv", max_length=32)
  run = experiment.build(config)
  examples = jax.tree.map(lambda x: x[:4], run.datasets["train"].arrays())
  batch = run.task.prepare(None, examples, train=False)
  vocabulary = run.task.vocabulary
  for ids, segments, real in zip(*(np.asarray(batch[k]) for k in ("ids", "segments", "real"))):
    first, second = np.flatnonzero(ids == vocabulary.sep)
    assert second == real.sum() - 1
    np.testing.assert_array_equal(segments[real], np.arange(second + 1) > first)
  logits = lambda batch: np.asarray(run.task.predict(variables, batch).outputs)
  variables = jax.jit(run.task.init)(jax.random.key(0))
  kernel = variables["params"]["head"]["kernel"]
  variables["params"]["head"]["kernel"] = jax.random.normal(jax.random.key(1), kernel.shape)
  variables["params"]["encoder"]["segment_types"]["embedding"] *= 50.0
  assert np.abs(logits(batch) - logits(batch | {"segments": 0 * batch["segments"]})).max() > 1e-3
  answers = run.task.answer(variables, ["the film\tso good", "no pair", "so\tgood"])
  assert next(answers)["class"] in ("negative", "positive")
  with pytest.raises(UserError, match="input 2 is 'no pair'; allowed: two sentences with a tab"):
    next(answers)


@pytest.mark.parametrize("pooling", ["mean", "first", "pooler"])
def test_padding_changes_neither_loss_nor_gradient(config, pooling):
  """Sentences of at most 6 tokens, padded to 16 by other rubbish, and to 6."""
  config.pooling = pooling
  task, rng = tasks.find("text_classification")(config), np.random.default_rng(0)
  examples = jax.tree.map(lambda x: x[:8], task.datasets()["train"].arrays())
  examples["length"] = np.array([6, 3, 5, 6, 4, 6, 3, 5], np.int32)
  padded = task.prepare(None, examples, train=False)
  rubbish = jnp.where(padded["real"], padded["ids"], rng.integers(5, 20, (8, 16)))
  cut = {k: x[:, :6] if x.ndim == 2 else x for k, x in padded.items()}
  shake = lambda x: x + 0.1 * rng.normal(size=x.shape).astype(np.float32)
  params = jax.tree.map(shake, jax.jit(task.init)(jax.random.key(0))["params"])
  loss = lambda p, batch: task.loss({"params": p}, batch, jax.random.key(0))[0].value()
  whole, *others = (
    jax.value_and_grad(loss)(params, batch) for batch in (padded, {**padded, "ids": rubbish}, cut)
  )
  for other in others:
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
    jax.tree.map(close, whole, other)


@pytest.mark.parametrize("pooling", ["mean", "first", "pooler"])
@pytest.mark.thorough
def test_padding_counts_in_no_factor(config, pooling):
  config.pooling = pooling
  task = tasks.find("text_classification")(config)
  examples = jax.tree.map(lambda x: x[:8], task.datasets()["train"].arrays())
  examples["length"] = np.full(8, 6, np.int32)
  padded = task.prepare(None, examples, train=False)
  whole = {k: x[:, :6] if x.ndim == 2 else x for k, x in padded.items()}
  rng = np.random.default_rng(0)
  shake = lambda x: x + 0.1 * rng.normal(size=x.shape).astype(np.float32)
  params = jax.tree.map(shake, jax.jit(task.init)(jax.random.key(0))["params"])
  predict = lambda params, batch: task.predict({"params": params}, batch)
  curvature = Curvature(predict, params, padded, estimation="empirical")
  found, expected = (jax.jit(curvature.estimate)(params, b) for b in (padded, whole))
  compare = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())
  jax.tree.map(compare, found, expected)


def test_mistakes_are_one_line(config, folder, tmp_path):
  def refused(match, **fields):
    other = config.copy_and_resolve_references()
    other.update_from_flattened_dict(fields)
    with pytest.raises(UserError, match=match):
      experiment.build(tasks.find(other.task).complete(other))

  for name in ("train", "test", "more"):
    shutil.copy(folder / f"{name}.tsv", tmp_path)
  lines = (folder / "test.tsv").read_text().replace("positive", "mixed", 1)
  (tmp_path / "odd.tsv").write_text(lines)
  here = {"data.dir": str(tmp_path)}
  refused(
    "odd.tsv: line 3: label 'mixed' is not one of training: negative, positive",
    **here | {"data.test_split": "odd.tsv"},
  )
  refused("sentenc", **{"data.text": "review"})
  only = [line for line in lines.splitlines() if not line.startswith("positive")]
  (tmp_path / "one.tsv").write_text("\n".join(only).replace("mixed", "negative") + "\n")
  refused("has only the label 'negative'", **here | {"data.train_split": "one.tsv"})
  refused("allowed: different columns", **{"data.label": ""})
  refused("allowed: different columns", **{"data.label": "sentence"})
  refused(
    "are 'sentence', 'other', 'label'; allowed with data.name='sample': 'sentence', '', 'label'",
    **{"data.name": "sample", "data.dir": "", "data.pair": "other"},
  )
  refused(
    "data.validation_split is 'dev': '.*/dev': no such file", **{"data.validation_split": "dev"}
  )
  (tmp_path / "model.safetensors").touch()
  refused(
    "holds no run.*; for the weights in it take '.*/model.safetensors'", pretrained=str(tmp_path)
  )
  (tmp_path / "model.safetensors").unlink()
  (tmp_path / "tables").mkdir()
  refused("tables: is a folder; allowed: a table", **here | {"data.train_split": "tables"})
  scored = [f"{i / 4}\tthe film was good" for i in range(10)]
  (tmp_path / "scored.tsv").write_text("\n".join(["label\tsentence", *scored]) + "\n")
  refused(
    "column 'label' has numbers such as 0.25; classes", **here | {"data.train_split": "scored.tsv"}
  )
  both = [f"{label}\tthe film was good" for label in ("0", "1", "1.0", "0.0") * 8]
  (tmp_path / "both.tsv").write_text("\n".join(["label\tsentence", *both]) + "\n")
  refused("writes the number 0 in two ways; allowed", **here | {"data.train_split": "both.tsv"})
  numbered = [f"{i}\tthe film was good" for i in range(30)]
  (tmp_path / "numbered.tsv").write_text("\n".join(["label\tsentence", *numbered]) + "\n")
  refused("has 30 labels in 30 rows, all different", **here | {"data.train_split": "numbered.tsv"})
  refused("holds no run", pretrained=str(tmp_path))
  refused("holds no run", frozen_from=str(tmp_path))


def test_classes_are_those_of_all_training_files(config, folder, tmp_path):
  """Also of files in folders, whatever the first of them has."""
  header, *lines = (folder / "train.tsv").read_text().splitlines()
  (tmp_path / "own").mkdir()
  for name in ("negative", "positive"):
    chosen = [line for line in lines if line.startswith(name)]
    (tmp_path / "own" / f"{name}.tsv").write_text("\n".join([header, *chosen]) + "\n")
  config.data.dir, config.data.test_split = str(tmp_path), "own/negative.tsv[:10]"
  config.data.train_split = "own/positive.tsv+own/negative.tsv[10:]"
  run = experiment.build(config)
  assert run.task.class_names == ("negative", "positive")
  assert len(run.datasets["train"]) == len(lines) - 10
  assert set(run.datasets["test"].arrays()["label"]) == {0}


def test_cut_sentences_are_counted_and_said(config, caplog):
  config.data.max_length = 6
  experiment.build(config)
  assert "of 75 examples are longer than data.max_length, 6 tokens" in caplog.text


def test_words_that_the_vocabulary_lacks_are_told(config, tmp_path, caplog):
  experiment.build(config)
  assert "[UNK]" not in caplog.text
  rows = [f"{i % 2}\tgut gemacht good" for i in range(64)]
  (tmp_path / "other.tsv").write_text("\n".join(["label\tsentence", *rows]) + "\n")
  config.data.dir = str(tmp_path)
  config.data.update(train_split="other.tsv[:40]", test_split="other.tsv[40:]")
  experiment.build(config)
  assert "other.tsv: 40% of the tokens are [UNK]" in caplog.text  # of [CLS] gut gemacht good [SEP]


def test_an_encoder_of_frozen_pairs_is_no_start_for_sentences():
  """It has segments and a projection, and its words lie in another run."""
  array = np.zeros((2, 4), np.float32)
  given = {"encoder": {"segment_types": {"embedding": array}, "project": {"kernel": array}}}
  fresh = {"encoder": {"words": {"embedding": array}}}
  told = (
    "PAIRS does not fit the model: missing are words/embedding; left over are project/kernel, s"
  )
  with pytest.raises(UserError, match=told):
    encoders.started(fresh, given, None, "PAIRS")


def test_answers_take_a_list_of_sentences(config):
  task = experiment.build(config).task
  assert not list(task.answer({}, []))
  with pytest.raises(UserError, match="the inputs are the text 'good'; allowed: a list"):
    list(task.answer({}, "good"))


def test_numbers_are_classes_in_the_order_of_their_values(config, tmp_path):
  """GLUE's F1 is that of the second class: of 1 where the other is -1."""
  labels = ["10", "1.5", "-1", "2", "more", "nan"] * 2
  rows = [f"{label}\tthe film was good" for label in labels]
  (tmp_path / "train.tsv").write_text("\n".join(["label\tsentence", *rows]) + "\n")
  config.data.dir, config.batch_size, config.mesh.data = str(tmp_path), 4, 1
  config.data.update(train_split="train.tsv[:6]", test_split="train.tsv[6:]", validation_split="")
  run = experiment.build(config)
  assert run.task.class_names == ("-1", "1.5", "2", "10", "more", "nan")


def test_another_file_is_tested_as_by_numpy(config, vocabulary, tmp_path):
  rows = list(sentences(9, 21))
  lines = ["label\tsentence", *map("\t".join, rows)]
  (tmp_path / "other.tsv").write_text("\n".join(lines) + "\n")
  config.data.test_sets = f"other={tmp_path}/other.tsv"
  run = experiment.build(config)
  variables = shaken(run.task.init(jax.random.key(0)), 0.3)
  ids = np.full((21, 16), vocabulary.pad)
  for row, tokens in zip(ids, vocabulary.encode([text for _, text in rows])):
    row[: len(tokens) + 2] = [vocabulary.cls, *tokens, vocabulary.sep]
  logits = np.float64(run.task.model.apply(variables, ids, ids != vocabulary.pad, None, None))
  own = np.array([label == "positive" for label, _ in rows]).astype(int)
  losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(21), own]
  found = Evaluator(run, "other")(variables)
  expected = {"loss": losses.mean(), "accuracy": (logits.argmax(1) == own).mean()}
  assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def test_class_weights_and_sampling_by_class(config, folder):
  config.class_weight, config.data.sampling = "balanced", "class"
  config.data.train_split = "train.tsv+more.tsv[:5]+more.tsv[7:8]"
  run = experiment.build(config)
  arrays = run.datasets["train"].arrays()
  counts = np.bincount(arrays["label"])
  assert (
    counts.sum() == 646 and np.ptp(np.bincount(arrays["label"][run.order.indices(1)].ravel())) < 2
  )
  weights = 646 / (2 * counts)
  examples = {name: jnp.asarray(x[:9]) for name, x in arrays.items()}
  batch = run.task.prepare(None, examples, train=True)
  variables = shaken(run.task.init(jax.random.key(0)), 0.3)
  logits, own = np.float64(run.task.predict(variables, batch).outputs), arrays["label"][:9]
  losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(9), own]
  found = run.task.loss(variables, batch, jax.random.key(0))[0].value()
  np.testing.assert_allclose(found, np.average(losses, weights=weights[own]), rtol=1e-5)
  np.testing.assert_allclose(run.task.predict(variables, batch).weights, weights[own], rtol=1e-6)
