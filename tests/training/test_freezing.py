"""Parameters that are not trained, and updates that shrink with the depth."""

import jax
import numpy as np
import pytest

from docs.own_task import Derivative
from mixer_jax import config as config_lib
from mixer_jax import evaluate, experiment, export, models, optim, pretrained
from mixer_jax.errors import UserError
from mixer_jax.tasks import freeze
from mixer_jax.training import loop, restore
from mixer_jax.training.state import init_state
from mixer_jax.training.step import update
from tests.conftest import optimizer_of, waves


@pytest.fixture
def config(tiny_config):
  tiny_config.model.update(hidden_dim=8, num_blocks=1, tokens_mlp_dim=4, channels_mlp_dim=8)
  tiny_config.data.pad = 0
  return tiny_config


def flat(tree):
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {jax.tree_util.keystr(k, simple=True, separator="/"): np.asarray(x) for k, x in leaves}


def stepped(config, steps=1):
  """A run, the parameters of its start with a head that is not zero, and those after some steps."""
  run = experiment.build(config)
  state = init_state(run)
  head = jax.random.normal(jax.random.key(1), state.params["head"]["kernel"].shape)
  params = {**state.params, "head": {**state.params["head"], "kernel": head}}
  state = state.replace(variables={**state.variables, "params": params})
  start, step = state, jax.jit(lambda s, batch: update(run, s, batch)[0])
  for _ in range(steps):
    state = step(state, batch_of(run))
  return run, start, state


def batch_of(run):
  examples = jax.tree.map(lambda x: x[:32], run.datasets["train"].arrays())
  return run.task.prepare(jax.random.key(0), examples, train=True)


def test_depths_are_those_of_beit():
  for scanned in (False, True):
    fields = dict(patch_size=4, hidden_dim=4, num_blocks=3, channels_mlp_dim=4)
    model = models.build("resmlp_s12", 2, scan_blocks=scanned, pooling="class_mlp", **fields)
    params = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 8, 8, 3), "f"))
    shapes = {k: x.shape for k, x in flat_shapes(params["params"]).items()}
    found = models.depths(shapes)
    assert found.keys() == shapes.keys()
    assert found["stem/kernel"] == found["stem/bias"] == 4
    rest = ("head/kernel", "norm/scale", "ClassMlpBlock_1/norm1/scale", "class_token/embedding")
    assert not any(found[name] for name in rest)
    if scanned:
      kernel = found["ResMlpBlocks/cross_patch/kernel"]
      assert kernel.tolist() == [[[3]], [[2]], [[1]]]
    else:
      assert [found[f"ResMlpBlock_{i}/norm1/scale"] for i in range(3)] == [3, 2, 1]


def flat_shapes(tree):
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {jax.tree_util.keystr(k, simple=True, separator="/"): x for k, x in leaves}


def test_depths_of_models_inside_others():
  paths = ("backbone/MixerBlock_1/LayerNorm_0/scale", "encoder/words/embedding")
  assert models.depths({paths[0]: (3,), "decoder/kernel": (2,)})[paths[0]] == 1
  text = {"encoder/TransformerBlock_0/norm/scale": (3,), paths[1]: (3,), "head/kernel": (3,)}
  text["encoder/embeddings_norm/scale"] = (3,)
  assert list(models.depths(text).values()) == [1, 2, 0, 2]
  for names in ((), ("Dense_0/kernel",), ("encoder/ResMlpBlock_0/a", "decoder/ResMlpBlock_0/a")):
    with pytest.raises(ValueError, match="no single order"):
      models.depths(dict.fromkeys(names, (3,)))


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.thorough
def test_updates_of_sgd_shrink_with_the_depth(config, scanned):
  config.optimizer = config_lib.optimizer("sgd", learning_rate=0.1, momentum=0.0)
  config.optimizer.update(weight_decay=0.5, decay="all")
  config.model.num_blocks = 2
  config.model.scan_blocks = scanned
  config.layer_decay = 0.5
  run, start, end = stepped(config)
  loss = lambda params: run.task.loss({"params": params}, batch_of(run), jax.random.key(0))[0]
  grads = flat(models.unrolled(jax.grad(lambda params: loss(params).value())(start.params)))
  ends, depths = flat(models.unrolled(end.params)), {"MixerBlock_1": 1, "MixerBlock_0": 2}
  for path, old in flat(models.unrolled(start.params)).items():
    scale = 0.5 ** (depths | {"stem": 3}).get(path.partition("/")[0], 0)
    expected = old - 0.1 * scale * (grads[path] + 0.5 * old)
    np.testing.assert_allclose(ends[path], expected, rtol=2e-4, atol=2e-6)


OPTIMIZERS = {
  "adamw": lambda: config_lib.optimizer("adamw", learning_rate=0.1, weight_decay=0.3),
  "lamb": lambda: config_lib.optimizer("lamb", learning_rate=0.1, weight_decay=0.3),
  "graft": lambda: optimizer_of("graft"),  # of SGD and K-FAC
  "kfac_adam": lambda: config_lib.optimizer("kfac_adam", learning_rate=0.1, weight_decay=0.3),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_whole_updates_of_any_optimizer_shrink(config, name):
  config.optimizer = OPTIMIZERS[name]()
  _, start, plain = stepped(config)
  config.layer_decay = 0.25
  _, _, end = stepped(config)
  starts, plain, end = (flat(s.params) for s in (start, plain, end))
  for path, scale in (
    ("head/bias", 1),
    ("MixerBlock_0/LayerNorm_0/scale", 1 / 4),
    ("stem/kernel", 1 / 16),
  ):
    moved = plain[path] - starts[path]
    assert np.abs(moved).max() > 1e-4
    np.testing.assert_allclose(end[path] - starts[path], scale * moved, rtol=1e-3, atol=1e-6)


def test_a_decay_that_cannot_be_is_refused(config):
  config.layer_decay = 0.5
  config.optimizer = config_lib.optimizer("kfac", learning_rate=1.0, quadratic_model=True)
  plain = config_lib.optimizer("kfac", learning_rate=1.0)
  pairs = (config.optimizer, plain), (plain, config.optimizer)
  for optimizer in (config.optimizer, *(config_lib.grafted(*pair) for pair in pairs)):
    config.optimizer = optimizer
    with pytest.raises(UserError, match="layer_decay is 0.5; the optimizer reckons"):
      experiment.build(config)
  waves = config_lib.default("docs.own_task:Derivative")
  waves.update(layer_decay=0.5)
  with pytest.raises(UserError, match="layer_decay is 0.5, but of task docs.*no single order"):
    experiment.build(waves)


@pytest.mark.thorough
def test_a_frozen_backbone_stays_and_costs_the_optimizer_nothing(config, tmp_path):
  config.update(freeze="backbone", ema_decay=0.5, num_steps=2, checkpoint_steps=1, eval_steps=2)
  run = experiment.build(config)
  start = init_state(run)
  assert start.params.keys() == start.variables["average"].keys() == {"head"}
  images = np.zeros((3, 8, 8, 3), np.uint8)
  assert run.task.probabilities(start.variables, images).shape == (3, 4)
  like_head = {x.shape for x in jax.tree.leaves(start.params)} | {()}
  assert {x.shape for x in jax.tree.leaves(start.opt_state)} <= like_head

  directory = loop.train(config, str(tmp_path / "run"))
  whole = evaluate.evaluate(str(directory))
  _, variables = restore.load_run(str(directory))
  assert variables.keys() == {"params"}
  ended, held = flat(variables["params"]), flat(start.variables[freeze.FROZEN])
  assert ended.keys() - held.keys() == {"head/kernel", "head/bias"}
  for path, array in held.items():
    np.testing.assert_array_equal(ended[path], array)
  assert np.any(ended["head/kernel"])
  file = export.export(str(directory), "latest", str(tmp_path / "w.npz"))
  assert pretrained.read(str(file)).arrays.keys() == ended.keys()

  (directory / "checkpoints" / "2").rename(tmp_path / "gone")
  loop.train(config, str(directory))
  assert evaluate.evaluate(str(directory)) == whole


@pytest.mark.thorough
def test_kfac_of_a_frozen_backbone_is_that_of_the_head_alone(config):
  config.freeze = "backbone"
  config.optimizer = config_lib.optimizer("kfac", learning_rate=0.1)
  config.model.scan_blocks = True
  run, start, _ = stepped(config, steps=0)
  p, batch = run.problem, batch_of(run)
  collections = {freeze.FROZEN: start.variables[freeze.FROZEN]}
  curvature = optim.Curvature(p.predict, p.params, p.batch, estimation="exact", in_axes=p.in_axes)
  assert [block.name for block in curvature.blocks] == ["head"]
  factors = curvature.factors(start.params, (batch, collections), jax.random.key(0))
  # Features are the logits of a head that is the identity.
  model = run.task.model.clone(num_classes=8)
  identity = {"head": {"kernel": np.eye(8, dtype=np.float32), "bias": np.zeros(8, np.float32)}}
  params = start.variables[freeze.FROZEN] | identity
  features = np.asarray(model.apply({"params": params}, batch["image"]), float)
  rows = np.concatenate([features, np.ones((32, 1))], axis=1)
  logits = features @ np.asarray(start.params["head"]["kernel"], float)
  p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
  fisher = np.mean([np.diag(row) - np.outer(row, row) for row in p], axis=0)
  a, g = jax.tree.leaves(factors["head"])
  np.testing.assert_allclose(a, rows.T @ rows / 32, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(g, fisher, rtol=1e-3, atol=1e-5)


class Renamed(Derivative):
  """Its methods name their first argument otherwise than the contract."""

  def loss(self, v, b, key):
    return super().loss(v, b, key)

  def evaluate(self, v, b, mask):
    return super().evaluate(v, b, mask)

  def predict(self, v, b):
    return super().predict(v, b)


def test_a_task_may_name_its_arguments_as_it_likes():
  rows = []
  for task in ("docs.own_task:Derivative", f"{__name__}:Renamed"):
    config = waves("sgd", num_steps=2, eval_steps=2, freeze="Dense_0")
    config.task = task
    rows += [row["test/error"] for _, row in loop.evaluations(experiment.build(config))]
  assert rows[0] == rows[1]


def test_patterns_find_some_parameters(config):
  config.freeze = r"^MixerBlock_0/.*kernel$"
  run = experiment.build(config)
  assert len(flat_shapes(run.variable_shapes[freeze.FROZEN])) == 4
  config.optimizer = config_lib.optimizer("kfac", learning_rate=1.0)
  with pytest.raises(UserError, match="freeze is .* parts MixerBlock_0/channel_mixing/Dense_0; K-"):
    experiment.build(config)
  for pattern, why in (("nothing", "finds none of"), (".", "finds all of"), ("(", "no regular")):
    config.freeze = pattern
    with pytest.raises(UserError, match=f"freeze is '.*{why}"):
      _ = experiment.build(config).variable_shapes
