"""Masked language models: exact perplexity, padding, K-FAC, and runs through the commands."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixer_jax import config as config_lib
from mixer_jax import experiment, study, tasks
from mixer_jax.errors import UserError
from mixer_jax.rundir import metrics_file
from mixer_jax.study import record
from mixer_jax.tasks.text import pictures
from mixer_jax.training import restore, resume
from mixer_jax.training.evaluator import Evaluator
from tests import children
from tests.tasks import runs
from tests.tasks.runs import shaken
from tests.tasks.text.conftest import sentences

MODELS = ("gmlp_text_small", "mixer_text_small", "resmlp_text_small", "bert_tiny")


@pytest.fixture
def config(config_of):
  return config_of("masked_lm", field="sentence")


@pytest.mark.thorough
def test_settings_of_jax_change_no_mask(config):
  runs.assert_settings_change_no_draw(config)


@pytest.mark.thorough
def test_one_checkpoint_has_one_perplexity_under_any_setting(config, tmp_path):
  """In processes of their own, with JAX's variables of the environment."""
  config.update(num_steps=4, eval_steps=4, checkpoint_steps=4)
  children.trained(config, tmp_path / "run")
  logged = children.rows(tmp_path / "run")[-1]
  given = dict(ENABLE_X64="1", DEFAULT_PRNG_IMPL="rbg", THREEFRY_PARTITIONABLE="0")
  for settings in ({}, *({name: value} for name, value in given.items()), given):
    named = {f"JAX_{name}": value for name, value in settings.items()}
    command = [sys.executable, "-m", "mixer_jax.evaluate", f"--workdir={tmp_path / 'run'}"]
    said = subprocess.run(command, env=os.environ | named, capture_output=True, text=True)
    perplexity = float(re.search(r"perplexity (\S+)", said.stdout).group(1))
    print(named, perplexity)
    assert perplexity == pytest.approx(logged["test/perplexity"], rel=2e-5), (named, said.stderr)


@pytest.mark.thorough
def test_perplexity_is_that_of_numpy_for_any_batch_and_devices(config):
  config.data.packing = "cut"
  found = {}
  for batch, devices in ((1, 1), (8, 2), (32, 1), (100, 8)):
    config.update(eval_batch_size=batch)
    config.mesh.data = devices
    run = experiment.build(config)
    variables = shaken(run.task.init(jax.random.key(0)))
    found[batch, devices] = Evaluator(run)(variables)
  split = run.datasets["test"].arrays()
  batch = run.task.prepare(None, jax.tree.map(jnp.asarray, split), train=False)
  logits = np.asarray(run.task.predict(variables, batch).outputs, np.float64)
  logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
  losses = -np.take_along_axis(logits, np.asarray(batch["targets"])[..., None], -1)[..., 0]
  weights = np.asarray(batch["weights"])
  expected = np.exp((losses * weights).sum() / weights.sum())
  hits = ((logits.argmax(-1) == np.asarray(batch["targets"])) * weights).sum() / weights.sum()
  answers = run.task.representations(variables, batch)
  np.testing.assert_array_equal(answers["outputs"], logits.argmax(-1))
  for metrics in found.values():
    np.testing.assert_allclose(metrics["perplexity"], expected, rtol=1e-6)
    np.testing.assert_allclose(metrics["accuracy"], hits, rtol=1e-6)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.first(1)
def test_padding_changes_neither_loss_nor_gradient(config_of, model):
  """A batch of 9 tokens at most, padded to 16 and to 9, by other rubbish in the padding."""
  config = config_of("masked_lm", model, field="sentence")
  if model == "bert_tiny":
    config.model.dropout_rate = 0.0  # it would drop others of a longer batch
  long = tasks.find("masked_lm")(config)
  params = shaken(long.init(jax.random.key(0)))
  rng = np.random.default_rng(0)
  ids, lengths = rng.integers(5, 20, (6, 16)).astype(np.int32), np.array([9, 4, 7, 9, 3, 5])
  batch = dict(
    real=np.arange(16) < lengths[:, None],
    positions=np.array([[1, 2]] * 6, np.int32),
    targets=rng.integers(5, 20, (6, 2)).astype(np.int32),
    weights=np.array([[1, 1], [1, 0], [1, 1], [0, 1], [1, 0], [1, 1]], np.float32),
  )

  def loss(params, ids, tokens):
    cut = batch | {"ids": ids[:, :tokens], "real": batch["real"][:, :tokens]}
    return long.loss(params, cut, jax.random.key(0))[0].value()

  def close(a, b):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * max(1, np.abs(b).max()))

  whole = jax.value_and_grad(loss)(params, ids, 16)
  rubbish = np.where(batch["real"], ids, rng.integers(5, 20, ids.shape))
  for other in (
    jax.value_and_grad(loss)(params, rubbish, 16),
    jax.value_and_grad(loss)(params, ids, 9),
  ):
    jax.tree.map(close, whole, other)


@pytest.mark.thorough
def test_a_run_learns_and_fills_masks(config, tmp_path):
  config.num_epochs = 4
  children.trained(config, tmp_path / "whole")
  rows = metrics_file.read(tmp_path / "whole")
  assert rows[-1]["test/perplexity"] < rows[0]["test/perplexity"]
  answers = children.command(
    tmp_path / "log", "predict", f"--workdir={tmp_path / 'whole'}", "the film is very [MASK]"
  )
  assert answers.code == 0, answers.err
  answer = json.loads(answers.out.splitlines()[-1])
  [words] = answer["words"]
  assert answer["filled"].startswith("the film is very ") and len(words) == 5
  wrong = children.command(tmp_path / "log", "predict", f"--workdir={tmp_path / 'whole'}", "a film")
  assert "input 1, 'a film', has no [MASK]" in wrong.error


@pytest.mark.thorough
def test_a_vocabulary_that_is_gone_is_not_missed(config, folder, tmp_path):
  own = tmp_path / "own"
  shutil.copy(folder / "vocab.txt", own)
  config.data.vocabulary, config.num_epochs = str(own), 1
  children.trained(config, tmp_path / "run")
  other = tmp_path / "other.txt"
  head, rest = (words := own.read_text().splitlines())[:5], words[5:]
  other.write_text("\n".join(head + rest[::-1]) + "\n")
  wrong = f"data.vocabulary is '{other}'; allowed: a file like the run's copy"
  with pytest.raises(UserError, match=re.escape(wrong)):
    restore.restore(str(tmp_path / "run"), overrides=[f"data.vocabulary={other}"])
  restore.restore(str(tmp_path / "run"), overrides=[f"data.vocabulary={own}"])
  config.data.vocabulary = str(other)
  refused = children.Child(config, tmp_path / "run")
  assert refused.wait() == 2 and wrong in refused.error
  own.unlink()
  stored, _variables = restore.stored(str(tmp_path / "run"))
  assert stored.data.vocabulary == str(tmp_path / "run/files/data.vocabulary/own")
  config.num_epochs = 2
  config.data.vocabulary = str(own)
  refused = children.Child(config, tmp_path / "run")
  assert refused.wait() == 2 and "num_epochs was 1, is 2" in refused.error


@pytest.mark.thorough
def test_kfac_trains_it(config, tmp_path):
  """Words are drawn independently: the best perplexity is near that of their frequencies."""
  values = dict(factor_period=2, factor_decay=0.5, inverse_period=4)
  config.optimizer = config_lib.optimizer("kfac", 0.02, **values)
  config.num_epochs = config.eval_epochs = 8
  config.model.scan_blocks = True
  config.model.num_blocks = 2
  children.trained(config, tmp_path / "run")
  split = experiment.build(config).datasets["test"].arrays()
  words = split["ids"][split["ids"] > 4]
  shares = np.unique_counts(words).counts / len(words)
  best = np.exp(-np.sum(shares * np.log(shares)))
  assert metrics_file.read(tmp_path / "run")[-1]["test/perplexity"] < 1.1 * best


def test_the_last_of_two_starts_decides_on_a_kept_file(tmp_path):
  """The first one ended before its first checkpoint."""
  for name, text in (("a.txt", "old"), ("b.txt", "new")):
    (tmp_path / name).write_text(text)
    resume.keep_files(tmp_path, {"data.vocabulary": str(tmp_path / name)})
  config = config_lib.default("masked_lm", "gmlp_text_small")
  kept = resume.with_copies(config, tmp_path).data.vocabulary
  assert pathlib.Path(kept).read_text() == "new"
  for name in ("b.txt", "gone.txt"):
    config.data.vocabulary = str(tmp_path / name)
    resume.check_files(tmp_path, config)
  config.data.vocabulary = str(tmp_path / "a.txt")
  with pytest.raises(UserError, match="data.vocabulary is '.*a.txt'; allowed: a file like the run"):
    resume.check_files(tmp_path, config)


def test_a_begun_study_keeps_its_vocabulary(tmp_path):
  for name, text in (("a.txt", "old"), ("b.txt", "new"), ("c.txt", "old")):
    (tmp_path / name).write_text(text)
  config = lambda model: config_lib.default("masked_lm", model)
  axes = {"model": ("gmlp_text_small", "amlp_text_small")}
  grid = study.Study("words", config, axes, lines=("model",))
  set_to = lambda name: [f"data.vocabulary={tmp_path / name}"]
  opened = record.open_study(tmp_path, grid, "f.py", set_to("a.txt"))
  opened.path(opened.runs[0]).mkdir()
  record.open_study(tmp_path, grid, "f.py", set_to("c.txt"))
  with pytest.raises(UserError, match="data.vocabulary was .*c.txt', is .*b.txt' in 6 of 6 runs"):
    record.open_study(tmp_path, grid, "f.py", set_to("b.txt"))


@pytest.mark.thorough
def test_pictures_show_matrices_and_attention(config_of):
  config = config_of("masked_lm", "amlp_text_small", field="sentence")
  config.model.update(num_blocks=2)
  task = tasks.find("masked_lm")(config)
  variables = jax.jit(task.init)(jax.random.key(0))
  drawn = task.pictures(variables, task.datasets()["test"])
  assert set(drawn) == {"spatial", "filters", "attention"}
  kernel = variables["params"]["encoder"]["GmlpBlock_1"]["spatial_gating"]["Dense_0"]["kernel"]
  np.testing.assert_array_equal(pictures.matrices(variables["params"])["GmlpBlock_1"], kernel.T)


def test_the_share_of_a_toeplitz_matrix():
  rng = np.random.default_rng(0)
  diagonals = rng.normal(size=13)
  toeplitz = np.array([[diagonals[i - j + 6] for j in range(7)] for i in range(7)])
  np.testing.assert_allclose(pictures.toeplitz_share(toeplitz), 1)
  matrix = rng.normal(size=(7, 7))
  basis = np.stack([np.eye(7, k=k).ravel() for k in range(-6, 7)], 1)
  nearest = basis @ np.linalg.lstsq(basis, matrix.ravel(), rcond=None)[0]
  expected = np.sum(nearest**2) / np.sum(matrix**2)
  np.testing.assert_allclose(pictures.toeplitz_share(matrix), expected)


@pytest.mark.parametrize(
  "named, field, value",
  [
    ("data.vocabulary", "data.vocabulary", ""),
    ("train.tsv", "data.field", "text"),
    ("absent.txt", "data.train_split", "absent.txt"),
    ("shares examples", "data.validation_split", "train.tsv[:10%]"),
    ("ffn_dim", "model.ffn_dim", 17),
  ],
)
def test_a_mistake_names_its_field_or_file(config, named, field, value):
  config.update_from_flattened_dict({field: value})
  with pytest.raises(UserError, match=named):
    experiment.build(config)


def test_another_file_is_tested_as_by_numpy(config, vocabulary, tmp_path):
  """Its lines, a sequence each; the sets of the run are tables, and it is plain text."""
  lines = [text for _, text in sentences(9, 21)]
  (tmp_path / "other.txt").write_text("\n".join(lines) + "\n")
  config.data.update(packing="cut", test_sets=f"other={tmp_path}/other.txt")
  run = experiment.build(config)
  variables = shaken(run.task.init(jax.random.key(0)))
  ids, length = np.full((21, 16), vocabulary.pad), np.zeros(21, int)
  for i, tokens in enumerate(vocabulary.encode(lines)):
    length[i] = len(tokens) + 2
    ids[i, : length[i]] = [vocabulary.cls, *tokens, vocabulary.sep]
  examples = {"ids": jnp.asarray(ids), "length": jnp.asarray(length), "row": jnp.arange(21)}
  batch = jax.device_get(run.task.prepare(None, examples, train=False))
  logits = np.float64(run.task.predict(variables, batch).outputs)
  logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
  losses = -np.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
  loss = np.average(losses, weights=batch["weights"])
  found = Evaluator(run, "other")(variables)
  assert (found["loss"], found["perplexity"]) == pytest.approx((loss, np.exp(loss)), rel=1e-5)
