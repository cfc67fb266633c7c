"""Translation: losses, padding, BLEU, runs through the commands, and their mistakes."""

import json
import pathlib
import re
import subprocess
import sys

import flax.linen as nn
import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import numpy as np
import pytest
import sacrebleu

from mixer_jax import config as config_lib
from mixer_jax import experiment, predict, tasks
from mixer_jax.data.dataset import Arrays, Bucketed
from mixer_jax.errors import UserError
from mixer_jax.rundir import metrics_file, provenance
from mixer_jax.runtime import mesh as mesh_lib
from mixer_jax.tasks.translation import bleu, pictures
from mixer_jax.text.subwords import Subwords
from mixer_jax.training.evaluator import Evaluator
from mixer_jax.training.state import init_state
from mixer_jax.training.trainer import Trainer
from tests import children
from tests.tasks.runs import assert_settings_change_no_draw, shaken

WORDS = dict(zip("one two three four five six".split(), "eins zwei drei vier fünf sechs".split()))
LENGTH = 16


def sentences(seed, number):
  """Pairs of which the second is the first, word by word."""
  rng = np.random.default_rng(seed)
  for _ in range(number):
    words = rng.choice(list(WORDS), rng.integers(1, 7))
    yield " ".join(words), " ".join(WORDS[word] for word in words)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """train, val and test in two languages, and bpe.json."""
  path, texts = tmp_path_factory.mktemp("pairs"), []
  for seed, (name, number) in enumerate({"train": 300, "val": 20, "test": 21}.items()):
    for language, lines in zip(("en", "de"), zip(*sentences(seed, number))):
      (path / f"{name}.{language}").write_text("".join(f"{line}\n" for line in lines))
      texts += lines
  Subwords.train(texts, 290).save(path / "bpe.json")
  return path


@pytest.fixture
def config(folder):
  config = config_lib.default("translation", "resmlp_translate_small")
  config.update(batch_size=8, eval_batch_size=10, num_epochs=1, label_smoothing=0.2)
  config.mesh.data = 1
  config.model.update(hidden_dim=16, num_blocks=1, channels_mlp_dim=32, num_heads=2)
  config.model.dropout_rate = 0.0
  config.data.update(name="files", dir=str(folder), vocabulary=str(folder / "bpe.json"))
  config.data.update(validation_split="val", max_length=LENGTH, batch_tokens=256, batch_shapes=2)
  config.optimizer = config_lib.optimizer("adam", 5e-3)
  return config


def started(run):
  return shaken(jax.device_get(jax.jit(run.task.init)(jax.random.key(0))))


def mesh_of(data, model=1):
  automatic, devices = (AxisType.Auto,) * 2, jax.devices()[: data * model]
  return jax.make_mesh((data, model), mesh_lib.AXES, automatic, devices=devices)


@pytest.mark.thorough
def test_settings_of_jax_change_no_dropout(config):
  config.model.dropout_rate = 0.3
  assert_settings_change_no_draw(config)


def test_a_batch_has_the_tokens_before_as_inputs(config):
  task = tasks.find("translation")(config)
  vocabulary, split = task.vocabulary, task.datasets()["test"]
  batch = task.prepare(None, jax.tree.map(lambda x: x[:9], split.tree), train=False)
  for row, reference in enumerate(split.references[:9]):
    number = int(batch["weights"][row].sum())
    own = list(map(int, batch["targets"][row][:number]))
    assert vocabulary.decode(own) == reference and own[-1] == vocabulary.eos
    assert list(map(int, batch["inputs"][row][:number])) == [vocabulary.bos, *own[:-1]]
  assert batch["weights"].any(0).all()  # as wide as the longest of the split


def test_losses_are_those_of_numpy(config):
  run = experiment.build(config)
  variables = started(run)
  batch = run.task.prepare(None, run.datasets["test"].tree, train=False)
  logits = np.float64(jax.jit(run.task.predict)(variables, batch).outputs)
  log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  weights, targets = np.asarray(batch["weights"]), np.asarray(batch["targets"])
  losses = -np.take_along_axis(log_p, targets[..., None], -1)[..., 0]
  smoothed = 0.8 * losses + 0.2 * -log_p.mean(-1)  # as much of each token
  loss, aux = jax.jit(run.task.loss)(variables, batch, jax.random.key(0))
  mean = lambda x: (x * weights).sum() / weights.sum()
  np.testing.assert_allclose(loss.value(), mean(smoothed), rtol=1e-5)
  np.testing.assert_allclose(aux.metrics["loss"].value(), mean(losses), rtol=1e-5)
  found = Evaluator(run)(variables)  # in batches of 10 of 21 sentences
  np.testing.assert_allclose(found["loss"], mean(losses), rtol=1e-5)
  np.testing.assert_allclose(found["accuracy"], mean(log_p.argmax(-1) == targets), rtol=1e-6)


@pytest.mark.thorough
def test_padding_and_devices_change_neither_loss_nor_gradient(config):
  """The whole width, the bucket's, and the bucket's on 2 and 8 devices."""
  run = experiment.build(config)
  variables, order, train = started(run), run.order, run.datasets["train"].tree

  @jax.jit
  def value_and_grad(params, examples):
    batch = run.task.prepare(None, examples, train=True)
    loss = lambda p: run.task.loss({"params": p}, batch, jax.random.key(0))[0].value()
    return jax.value_and_grad(loss)(params)

  steps = {len(order(step)): step for step in range(order.steps_per_epoch)}
  assert len(steps) == 3
  for size, step in steps.items():
    examples = jax.tree.map(lambda x, step=step: x[order(step)], train)
    whole = value_and_grad(variables["params"], examples)
    cut = order.cut(examples)
    assert cut["source"].shape == (size, order.shapes[size]) and examples["source"].shape[1] == 16
    spread = [NamedSharding(mesh_of(n), PartitionSpec(mesh_lib.AXES)) for n in (2, 8)]
    devices = spread if size == min(steps) else []
    for own in [cut, *(jax.device_put(cut, sharding) for sharding in devices)]:
      found = value_and_grad(variables["params"], own)
      close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
      jax.tree.map(close, found, whole)


@pytest.mark.thorough
def test_translations_do_not_depend_on_batch_and_devices(config):
  config.num_steps = config.eval_steps = config.checkpoint_steps = 30
  trainer = Trainer(run := experiment.build(config), init_state(run))
  trainer.advance()
  split, task = run.datasets["test"], run.task
  variables = jax.device_get({"params": trainer.state.params})
  sources = (split.tree["source"], split.tree["source_length"])
  whole = task.translated(variables, *sources, beams=2)
  alone = task.translated(variables, sources[0][7:8], sources[1][7:8], beams=2)
  assert len(set(whole.texts)) > 3 and alone.texts == [whole.texts[7]]
  np.testing.assert_allclose(alone.scores, whole.scores[7:8], rtol=1e-4)
  for shape in ((2, 1), (8, 1), (2, 2)):  # of 10 sentences, of the 21; parameters whole or split
    mesh = mesh_of(*shape)
    spread = jax.device_put(variables, mesh_lib.stored(mesh, variables))
    assert mesh_lib.of_process(spread)[1].size == shape[0] * shape[1]
    found = task.translated(spread, *sources, beams=2)
    assert found.texts == whole.texts
    np.testing.assert_allclose(found.scores, whole.scores, rtol=1e-4)
  greedy = task.translated(variables, *sources, beams=1)
  expected = bleu.corpus(greedy.texts, split.references)
  assert task.host_metrics(variables, split) == {"bleu": expected.score}


@pytest.mark.thorough
def test_a_run_learns_and_its_files_have_its_bleu(config, folder, tmp_path):
  config.update(num_epochs=24, eval_epochs=8, checkpoint_epochs=8)
  config.data.extra_test_splits = "val"
  run, log = tmp_path / "run", tmp_path / "log"
  trained = children.trained(config, run)
  rows = metrics_file.read(run)
  assert rows[-1]["test/loss"] < 0.7 * rows[0]["test/loss"]
  assert rows[-1]["validation/best_bleu"] > 5  # it learns
  assert rows[-1]["val/bleu"] == rows[-1]["validation/bleu"]
  assert trained.out.count("BLEU is nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:") == 1
  assert "3 shapes of batches: " in trained.out
  [session] = provenance.read(run)

  out = tmp_path / "found.txt"
  said = children.command(log, "predict", f"--workdir={run}", "--split=test", f"--out={out}")
  assert said.code == 0, said.err
  references = tmp_path / "found.references.txt"
  assert references.read_text() == (folder / "test.de").read_text()
  tool = [sys.executable, "-m", "sacrebleu", str(references), "-i", str(out), "-w", "6"]
  score = json.loads(subprocess.run(tool, capture_output=True, check=True, text=True).stdout)
  [(printed, signature)] = re.findall(r"BLEU ([\d.]+) with 4 beams \((.*)\)", said.out)
  assert float(printed) == round(score["score"], 2)
  assert score["signature"] == signature == session["data"]["bleu"]
  (tmp_path / "lines.txt").write_text("two four\n\n one \n\u043e\n")
  greedy = ("--set=beams=1", f"--inputs={tmp_path}/lines.txt")
  said = children.command(log, "predict", f"--workdir={run}", *greedy, "three")
  answers = [json.loads(line) for line in said.out.splitlines()]
  assert [answer["text"] for answer in answers] == ["three", "two four", " one ", "\u043e"]
  assert "\u043e" in said.out
  assert all(answer["score"] < 0 and answer["translation"] for answer in answers)


def test_a_text_takes_a_line_of_its_file(tmp_path):
  out = tmp_path / "found.txt"
  predict._write_texts({"translations": ["a", "b"], "references": ["c\nd", "e\r"]}, str(out))
  assert (out.read_text(), (tmp_path / "found.references.txt").read_text()) == (
    "a\nb\n",
    "c d\ne\n",
  )


def test_the_command_line_of_sacrebleu_gives_the_same(tmp_path):
  references = ["Ein Mann, 1,5 m groß, liest.", "Zwei Hunde laufen!", "Sie sagt: „Ja“."] * 4
  found = ["Ein Mann, 1.5 m groß, liest", "Zwei Hunde laufen !", "sie sagt: „Ja“. "] * 4
  for name, lines in (("references", references), ("found", found)):
    (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
  for tokenizer in ("13a", "char"):
    tool = [sys.executable, "-m", "sacrebleu", "references", "-i", "found", "-w", "9"]
    tool += [f"--tokenize={tokenizer}"]
    done = subprocess.run(tool, capture_output=True, check=True, text=True, cwd=tmp_path)
    score = json.loads(done.stdout)
    ours = bleu.corpus(found, references, tokenizer)
    assert score["score"] == pytest.approx(ours.score, abs=1e-8) and 0 < ours.score < 100
    assert score["signature"] == ours.signature


@pytest.mark.thorough
def test_kfac_trains_on_batches_of_several_lengths(config):
  config.optimizer = config_lib.optimizer("kfac_adam", 5e-3, factor_period=2, basis_period=2)
  config.num_steps = config.eval_steps = config.checkpoint_steps = 12
  trainer = Trainer(run := experiment.build(config), init_state(run))
  assert len({len(run.order(step)) for step in range(12)}) == 3
  trainer.advance()
  assert trainer.report()["train/loss"] < np.log(290)


@pytest.mark.thorough
def test_pictures_show_matrices_and_cross_attention(config):
  task = tasks.find("translation")(config)
  variables, split = shaken(jax.jit(task.init)(jax.random.key(0))), task.datasets()["test"]
  assert set(task.pictures(variables, split)) == {"encoder", "decoder", "cross_attention"}


@pytest.mark.thorough
def test_cross_attention_is_that_of_numpy():
  rng = np.random.default_rng(0)
  x, y, *kernels = (
    rng.normal(size=size).astype(np.float32) for size in ((3, 8), (5, 8), *[(8, 8)] * 2)
  )

  class Cross(nn.Module):
    @nn.compact
    def __call__(self, x, y):
      return nn.Dense(8, name="query")(x), nn.Dense(8, name="key")(y), nn.Dense(8, name="value")(y)

  class Block(nn.Module):
    @nn.compact
    def __call__(self, x, y):
      return Cross(name="cross_attention")(x[None], y[None])

  class Net(nn.Module):
    @nn.compact
    def __call__(self, x, y):
      return Block(name="DecoderBlock_0")(x, y)

  variables = jax.jit(Net().init)(jax.random.key(0), x, y)
  own = variables["params"]["DecoderBlock_0"]["cross_attention"]
  own["query"]["kernel"], own["key"]["kernel"] = kernels
  found = pictures.attention_maps(Net().apply, 2, variables, x, y)["DecoderBlock_0"]
  heads = []
  for part in (slice(4), slice(4, 8)):
    scores = np.exp((x @ kernels[0])[:, part] @ (y @ kernels[1])[:, part].T / 2)
    heads.append(scores / scores.sum(1, keepdims=True))
  np.testing.assert_allclose(found, np.mean(heads, 0), rtol=1e-4)


def test_cross_attention_of_many_blocks_is_in_their_order():
  ones = {part: {"__call__": (np.ones((1, 2, 4)),)} for part in ("query", "key")}
  names = [f"DecoderBlock_{i}" for i in range(12)]
  sown = {"intermediates": {name: {"cross_attention": ones} for name in names}}
  assert list(pictures.attention_maps(lambda **_: (None, sown), 2)) == names


def test_long_pairs_are_left_out_of_training_and_cut_in_tests(config, caplog):
  config.data.update(max_length=5, batch_tokens=0)
  task = tasks.find("translation")(config)
  splits = task.datasets()
  assert type(splits["train"]) is Arrays and 0 < len(splits["train"]) < 300
  left_out = 300 - len(splits["train"])
  assert f"{left_out} of 300 pairs" in caplog.text and "of 21 pairs" in caplog.text
  assert len(splits["test"]) == 21 and splits["test"].tree["source"].shape == (21, 5)
  whole = pathlib.Path(config.data.dir, "test.de").read_text().splitlines()
  assert list(splits["test"].references) == whole  # BLEU is that of whole sentences


@pytest.mark.parametrize(
  "fields, named",
  [
    ({"data.vocabulary": ""}, "data.vocabulary"),
    ({"data.vocabulary": "FOLDER/val.en"}, "val.en"),
    ({"data.target_language": "en"}, "data.target_language"),
    ({"data.target_language": "fr"}, "train.fr"),
    ({"data.max_length": 4, "data.train_split": "long"}, "data.max_length"),
    ({"model.num_heads": 3}, "num_heads"),
    ({"data.batch_tokens": 100}, "batch_tokens"),
  ],
)
def test_a_mistake_names_its_field_or_file(config, folder, fields, named):
  fields = {
    k: v.replace("FOLDER", str(folder)) if isinstance(v, str) else v for k, v in fields.items()
  }
  config.update_from_flattened_dict(fields)
  with pytest.raises(UserError, match=named) as caught:
    experiment.build(config)
  assert "\n" not in str(caught.value)


def test_sentences_before_one_that_is_too_long_are_answered(config, monkeypatch):
  task = tasks.find("translation")(config)
  monkeypatch.setattr(type(task), "translated", lambda *args: (["zwei"], [0.0]))
  for text in ("one " * 20, " "):
    answers = task.answer(None, ["two", text, "one"])
    assert next(answers) == {"text": "two", "translation": "zwei", "score": 0.0}
    with pytest.raises(UserError, match="has (0|[2-9][0-9]) tokens"):
      next(answers)


def test_a_missing_sacrebleu_is_told_before_text_is_read(config, monkeypatch):
  monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
  with pytest.raises(UserError, match="sacrebleu"):
    experiment.build(config)


@pytest.fixture(autouse=True)
def long_pair(folder):
  for language in ("en", "de"):
    (folder / f"long.{language}").write_text("one two three four five six\n")


def test_the_sample_and_its_parts(tmp_path):
  config = config_lib.default("translation", "resmlp_translate_small")
  config.data.update(train_split="train[:90%]", validation_split="train[90%:]", max_length=64)
  splits = tasks.find("translation")(config).datasets()
  assert {name: len(split) for name, split in splits.items()} == {
    "train": 2700,
    "validation": 300,
    "test": 200,
  }
  assert isinstance(splits["train"], Bucketed)


def test_other_files_are_tested_as_by_numpy(config, tmp_path):
  """A table of pairs, and its BLEU by the answers to its sentences."""
  pairs = list(sentences(9, 7))
  lines = ["de\ten", *(f"{target}\t{source}" for source, target in pairs)]
  (tmp_path / "other.tsv").write_text("\n".join(lines) + "\n")
  config.data.test_sets = f"other={tmp_path}/other.tsv"
  config.beams = 1
  run = experiment.build(config)
  variables, vocabulary = started(run), run.task.vocabulary
  total, count = 0.0, 0
  for source, target in pairs:
    ids = [[*tokens, vocabulary.eos] for tokens in vocabulary.encode([source, target])]
    inputs = np.array([[vocabulary.bos, *ids[1][:-1]]])
    batch = (np.array(ids[:1]), np.ones((1, len(ids[0])), bool), inputs, inputs >= 0)
    logits = np.float64(run.task.model.apply(variables, *batch))[0]
    total += np.sum(np.log(np.exp(logits).sum(1)) - logits[np.arange(len(logits)), ids[1]])
    count += len(logits)
  answers = run.task.answer(variables, [source for source, _ in pairs])
  translations = [answer["translation"] for answer in answers]
  score = sacrebleu.corpus_bleu(translations, [[target for _, target in pairs]]).score
  found = Evaluator(run, "other")(variables)
  assert (found["loss"], found["bleu"]) == pytest.approx((total / count, score), rel=1e-5)
