"""Training without a directory, and predictions for images of one's own."""

import jax
import numpy as np
from PIL import Image
import pytest

from mixer_jax import evaluate, experiment, in_memory, predict, train, workdir
from mixer_jax.errors import UserError


def test_epochs_and_predictions_are_those_of_a_run_in_a_directory(tiny_config, tmp_path):
  tiny_config.model.num_blocks = 1
  path = train.train(tiny_config, str(tmp_path))
  states, rows = zip(*in_memory.epochs(experiment.build(tiny_config)))
  logged = workdir.read_metrics(path)
  for row, stored in zip(rows, logged, strict=True):
    shared = [name for name in row if name in stored and "second" not in name]
    assert {"epoch", "train/loss", "train/accuracy", "test/loss", "test/top1"} <= set(shared)
    assert [row[name] for name in shared] == [stored[name] for name in shared]

  run, params, step, epoch = evaluate.restore(str(path), "latest")
  assert (step, epoch) == (16, 2)
  jax.tree.map(np.testing.assert_array_equal, params, states[-1].params)

  images, labels = run.dataset.test.images, run.dataset.test.labels
  assert len(images) % run.config.eval_batch_size  # a last, smaller batch
  found = predict.probabilities(run, params, images)
  mean, std = np.array(tiny_config.data.mean), np.array(tiny_config.data.std)
  logits = run.task.model.apply({"params": params}, (images / 255 - mean) / std)
  expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
  np.testing.assert_allclose(found, expected, atol=1e-5)
  assert np.mean(found.argmax(axis=1) == labels) == pytest.approx(logged[-1]["test/top1"])
  np.testing.assert_allclose(predict.probabilities(run, params, images[:1]), found[:1], atol=1e-6)


def test_files_become_images_of_the_run_s_size(tiny_config, tmp_path):
  run = experiment.build(tiny_config)
  image = run.dataset.test.images[0]
  same, wide = tmp_path / "same.png", tmp_path / "wide.png"
  Image.fromarray(image).save(same)
  Image.fromarray(np.pad(image, ((0, 0), (3, 3), (0, 0)))).save(wide)  # cut off again
  np.testing.assert_array_equal(predict.read_images(run, [same, wide]), np.stack([image, image]))
  with pytest.raises(UserError, match="none.png: cannot be read: No such file"):
    predict.read_images(run, [tmp_path / "none.png"])
