"""Programs compiled for devices that are not here, and plans of a program that really runs."""

import functools
import importlib.util
import json

import jax
import pytest

from benchmarks import flops
from mixer_jax import config as config_lib
from mixer_jax import optimizers, plan
from mixer_jax.errors import UserError
from mixer_jax.planning import programs, report, stand_ins, targets

_WHEELS = {"cuda": "jax_cuda12_plugin", "tpu": "libtpu"}
_BATCH = 512


def small(optimizer="kfac", **options):
  """A Mixer with every kind of its layers, on CIFAR-10's shapes."""
  config = config_lib.default(model="mixer_b4")
  config.data.name, config.batch_size = "cifar10", _BATCH
  config.model.update(num_blocks=1, hidden_dim=32, tokens_mlp_dim=16, channels_mlp_dim=48)
  config.optimizer = config_lib.optimizer(optimizer, learning_rate=1e-3, **options)
  return config


def enormous():
  """Batches as large as they may be."""
  config = small("sgd")
  config.data.update(name="imagenet21k", stored_size=32)
  return config


def parsed(spec):
  target = targets.parse(spec)
  if importlib.util.find_spec(_WHEELS[target.platform]) is None:
    pytest.skip(f"{_WHEELS[target.platform]} is not installed")
  return target


def parameters(run):
  return sum(x.size for x in jax.tree.leaves(run.variable_shapes["params"]))


@pytest.mark.parametrize("spec", ["h100:8", "v5e:2x4"])
def test_a_step_of_kfac_for_eight_devices(spec):
  config, target = small(factor_period=10, inverse_period=100), parsed(spec)
  run, _ = stand_ins.build(config, targets.devices(target))
  training = programs.training(run, target)
  found = report.steps(training, target, optimizers.periods(config.optimizer))
  kinds = [("plain", 1), ("factors", 10), ("inverses", 100)]
  assert [(step.kind, step.every) for step in found] == kinds
  plain, factors, inverses = found
  # The gradient is summed, in few messages, with the loss and its like.
  assert {*plain.collectives} == {"all-reduce"}
  number, size = plain.collectives["all-reduce"]
  assert number <= 4 and size == pytest.approx(4 * parameters(run), rel=0.01)
  # The batch is split: nothing of its size travels, and each device has an eighth of the products.
  image = 4 * _BATCH * 32 * 32 * 3
  for operation in training.program.operations:
    assert operation.payload < image / 8
  whole = 2 * flops.multiply_adds(jax.grad(mean_loss(run)), *shapes(run))
  assert plain.operations == pytest.approx(whole / 8, rel=0.25)
  # Factors and bases travel whole; those of products (TPUs) in stacks of eight, one a device.
  sizes = [
    size
    for b in optimizers.curvature_blocks(run.config.optimizer, run.problem)
    for size in b.factor_sizes
  ]
  squares = 4 * sum(size * size for size in sizes)
  assert factors.operations > 0 and inverses.operations > 0
  assert payload(factors) == pytest.approx(squares, rel=0.1)
  stacked = 4 * 8 * sum(size * size for size in (65, 49, 33, 17, 16, 10))  # 64 is padded to 65, ...
  wanted = squares if spec.startswith("h100") else stacked
  assert payload(inverses) == pytest.approx(wanted, rel=0.1)
  assert training.bytes < target.usable_memory


def payload(step):
  return sum(size for _, size in step.collectives.values())


def mean_loss(run):
  return lambda variables, batch: run.task.loss(variables, batch, jax.random.key(0))[0].total


def shapes(run):
  return run.variable_shapes, run.batch_shapes


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_operations_of_a_step_are_those_of_its_gradient(name):
  run, _ = stand_ins.build(small(name))
  compiled = programs.training(run)
  [step] = report.steps(compiled, targets.parse("h100"), optimizers.periods(run.config.optimizer))
  wanted = 2 * flops.multiply_adds(jax.grad(mean_loss(run)), *shapes(run)) / run.mesh.size
  assert step.operations == pytest.approx(wanted, rel=1e-3)


def test_arguments_are_the_state_and_the_data():
  run, _ = stand_ins.build(small("sgd"))
  compiled = programs.training(run)
  state = 2 * 4 * parameters(run)  # with momentum
  data = 50_000 * (32 * 32 * 3 + 4)
  assert compiled.arguments == pytest.approx(state + data, rel=0.01)


@pytest.mark.thorough
def test_the_largest_batch_fills_the_memory():
  target, config = parsed("h100"), enormous()
  found = plan.plan(config, target, largest_batch=True)
  config.batch_size = found.largest_batch // 2
  half = plan.plan(config, target).programs[0].bytes
  assert half == pytest.approx(target.usable_memory / 2, rel=0.1)


@pytest.mark.thorough
def test_a_plan_as_json_and_as_text_has_the_same_numbers():
  found = plan.plan(small("sgd"), parsed("h100:2x8"))
  data = json.loads(json.dumps(report.as_json(found)))
  assert data["number"] == 16 and data["programs"][0]["bytes"] == found.programs[0].bytes
  assert f"{1e3 * data['step_seconds']:.3g} ms" in "\n".join(report.lines(found))
  assert data["epoch_seconds"] == pytest.approx(data["step_seconds"] * (50_000 // _BATCH))


def test_bounds_of_a_step_are_the_published_peaks():
  operation = functools.partial(
    programs.operations.Operation, "name", "source", "plain", 2, precision="bfloat16", moved=0
  )
  h100, bound = targets.parse("h100:8"), report.bound
  assert bound([operation(products=989e12)], h100).arithmetic == pytest.approx(2.0)
  message = operation(products=0.0, collective="all-reduce", payload=1, sent=450e9)
  assert bound([message], h100).links == pytest.approx(2.0)
  # Of eight GPUs each sends an eighth of what is left to other hosts, at 50 GB/s.
  assert bound([message], targets.parse("h100:4x8")).links == pytest.approx(2 * 450 / 8 / 50)


@pytest.mark.parametrize(
  "spec, named",
  [
    ("x9", "h200"),
    ("h100:9", "2x8"),
    ("h100:two", "h100:two"),
    ("v5e:3x5", "v5e:3x5"),
    ("v5e:0x2", "v5e:0x2"),
  ],
)
def test_devices_that_do_not_exist_are_named(spec, named):
  with pytest.raises(UserError, match=named):
    targets.devices(parsed(spec))


def test_a_batch_that_the_devices_do_not_divide():
  config = small("sgd")
  config.batch_size = 100
  with pytest.raises(UserError, match="batch_size is 100.*multiple of 8"):
    plan.plan(config, parsed("h100:8"))


@pytest.mark.thorough
def test_a_program_that_does_not_fit_is_planned_all_the_same():
  config = enormous()
  config.batch_size = 2**21
  found = plan.plan(config, parsed("h100"))
  assert not report.fits(found.programs[0], found.target.usable_memory)
  assert "| no |" in "\n".join(report.lines(found))
