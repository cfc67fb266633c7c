"""Runs of DINO: killed and resumed, collapsed, by K-FAC; probed, drawn and handed on."""

import re

import jax
import numpy as np
from PIL import Image
import pytest

from mixer_jax import config as config_lib
from mixer_jax import experiment, predict, probe, tasks
from mixer_jax.errors import Diverged, UserError
from mixer_jax.tasks.images.probes import Knn
from mixer_jax.training import loop, restore, summary
from mixer_jax.training.checkpoint import Checkpoints
from tests import children
from tests.conftest import waves
from tests.tasks import runs
from tests.tasks.self_distillation.test_dino import small


@pytest.fixture(scope="module")
def config(shapes_npz):
  config = small(shapes_npz)
  config.update(num_steps=6, eval_steps=3, checkpoint_steps=3)
  config.mesh.data = 1
  config.knn.update(images=100, linear=True)
  config.optimizer = config_lib.optimizer("adamw", learning_rate=1e-2)
  return config


@pytest.fixture(scope="module")
def finished(config, tmp_path_factory):
  path = tmp_path_factory.mktemp("dino")
  return children.trained(config, path / "whole") and path / "whole"


@pytest.mark.thorough
def test_a_killed_run_goes_on_bit_for_bit(config, finished):
  runs.assert_kill_changes_nothing(config, finished.parent, 4, whole=finished)
  told = {"train/loss", "train/teacher_entropy", "train/centre_norm", "train/spread"}
  assert told <= children.rows(finished)[0].keys()


@pytest.mark.thorough
def test_two_devices_make_the_steps_of_one(config, finished, tmp_path):
  """The centre and the teacher's entropy are those of all views, not of a device's."""
  config = config.copy_and_resolve_references()
  config.mesh.data = 2
  children.trained(config, tmp_path / "two", devices=2)
  for one, two in zip(children.rows(finished), children.rows(tmp_path / "two"), strict=True):
    names = [name for name in one if name.startswith("train/")]
    assert len(names) > 3
    np.testing.assert_allclose([two[n] for n in names], [one[n] for n in names], rtol=1e-3)


@pytest.mark.thorough
def test_a_collapse_stops_the_run_with_a_checkpoint(config, tmp_path):
  config = config.copy_and_resolve_references()
  # Temperatures that make every distribution of the teacher uniform.
  config.dino.update(teacher_temperature=10.0, first_temperature=10.0, collapse_steps=2)
  config.checkpoint_steps = 1000
  with pytest.raises(Diverged) as told:
    loop.train(config, str(tmp_path / "run"))
  assert re.search(r"step 3.*collapsed: its entropy is 1.79\d* nats.*2 steps", str(told.value))
  assert told.value.exit_code == 3
  assert Checkpoints(tmp_path / "run", read_only=True).latest() == 3


@pytest.mark.thorough  # test_dino.py looks at what K-FAC sees
def test_kfac_trains_it(config):
  config = config.copy_and_resolve_references()
  config.update(num_steps=2, eval_steps=2)
  config.optimizer = config_lib.optimizer("kfac", learning_rate=0.05, norms="gradient")
  run = experiment.build(config)
  line, _ = summary.of_model(run)
  assert "kronecker" in line
  (state, row), *_ = loop.evaluations(run)
  assert np.isfinite(row["train/loss"]) and 0 <= row["test/knn"] <= 1
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))


@pytest.mark.thorough
def test_the_probe_finds_the_metric_of_the_run_and_takes_untrained_networks(config, finished):
  found = probe.probe(str(finished), how=Knn(images=100))
  row = children.rows(finished)[-1]
  assert found["knn"] == pytest.approx(row["test/knn"])
  assert found["linear"] == pytest.approx(row["test/linear"])
  assert 0.25 <= found["linear"] <= 1 and 0 <= found["held_out"] <= 1
  fresh = probe.probe(str(finished), untrained=True, with_linear=False)
  assert fresh.keys() == {"knn"} and 0 <= fresh["knn"] <= 1
  # The untrained teacher is the fresh student.
  run, variables, _ = restore.restore(str(finished))
  fresh = probe._fresh(run)
  jax.tree.map(np.testing.assert_array_equal, run.task.backbone(fresh), fresh["params"]["backbone"])
  with pytest.raises(UserError, match="split train"):
    run.task.host_metrics(variables, run.datasets["train"])


@pytest.mark.thorough
def test_answers_are_features_and_a_split_has_its_labels(finished, tmp_path):
  run, variables, _ = restore.restore(str(finished))
  found = predict.arrays(run, variables)
  test = run.datasets["test"].arrays()
  np.testing.assert_array_equal(found["labels"], test["label"])
  assert found["class_names"].tolist() == ["0", "1", "2", "3"] and "paths" not in found
  path = str(tmp_path / "a.png")
  Image.fromarray(test["image"][3]).save(path)
  task, variables = restore.load_run(str(finished))
  [answer] = task.answer(variables, [path])
  assert answer["path"] == path
  np.testing.assert_allclose(answer["features"], found["features"][3], rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_other_tasks_are_not_probed(tmp_path):
  path = loop.train(waves(num_steps=1), str(tmp_path / "run"))
  with pytest.raises(UserError, match="^task docs.own_task:Derivative has no features of images"):
    probe.probe(str(path))


@pytest.mark.thorough
def test_pictures_and_exported_weights_are_the_teacher_s(config, finished, tmp_path):
  run, variables, _ = restore.restore(str(finished))
  figures = run.task.pictures(variables, run.datasets["test"])
  assert figures.keys() == {"neighbours"} and len(figures["neighbours"].axes) == 8 * 9
  drawn = run.task.prepared_pictures(jax.random.key(0))
  assert len(drawn["views"].axes) == 6 * 6
  path = tmp_path / "teacher.npz"
  run.task.export(jax.device_get(variables), path)
  other = config_lib.default(model="resmlp_s12")
  other.model = config.model
  other.data.update(name="npz", dir=config.data.dir, image_size=8, pad=0)
  other.pretrained = str(path)
  task = tasks.find("image_classification")(other)
  start = task.initial(jax.eval_shape(task.init, jax.random.key(0)), None)["params"]
  expected = jax.device_get(run.task.backbone(variables))
  jax.tree.map(
    np.testing.assert_array_equal, {k: v for k, v in start.items() if k != "head"}, expected
  )


@pytest.mark.thorough
def test_settings_of_jax_change_no_view(config):
  runs.assert_settings_change_no_draw(config)
