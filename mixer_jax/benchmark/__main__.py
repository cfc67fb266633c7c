"""Benchmarks, each a command.

python -m mixer_jax.benchmark input [--config=FILE | --models=mixer_s16 --workers=4 --workers=8]
python -m mixer_jax.benchmark optimizers --config=configs/quickstart.py
python -m mixer_jax.benchmark dispatch --config=configs/quickstart.py
python -m mixer_jax.benchmark train [--models=mixer_s16] [--optimizers=sgd,kfac] [--dtype=bfloat16]
python -m mixer_jax.benchmark inference [--models=mixer_b16,resmlp_s12] [--batch_size=32]
python -m mixer_jax.benchmark scaling [--models=mixer_b16,mixer_l16]
python -m mixer_jax.benchmark compile [--models=mixer_b16,mixer_l16] [--optimizers=sgd,kfac]
"""

import pathlib
import tempfile
from typing import Iterable

from absl import flags
import ml_collections
from ml_collections import config_flags

from mixer_jax import cli, compilation, experiment, flops, models, optim
from mixer_jax import config as config_lib
from mixer_jax.benchmark import compile as compile_benchmark
from mixer_jax.benchmark import dispatch as dispatch_benchmark
from mixer_jax.benchmark import inference as inference_benchmark
from mixer_jax.benchmark import input as input_benchmark
from mixer_jax.benchmark import optimizers as optimizers_benchmark
from mixer_jax.benchmark import scaling as scaling_model
from mixer_jax.benchmark import streaming
from mixer_jax.benchmark import train as train_benchmark
from mixer_jax.errors import UserError
from mixer_jax.report import console


def _optimizers(argv: list[str]) -> None:
  del argv
  config = cli.checked_config(flags.FLAGS.config)
  console.print_devices()
  run = experiment.build(config)
  problem = run.problem
  blocks = optim.kfac_blocks(problem.predict, problem.params, problem.batch)
  periods = optimizers_benchmark.PERIODS.values()
  predicted = flops.step_costs(blocks, config.batch_size).ratio(*periods)
  costs = optimizers_benchmark.measure(run, flags.FLAGS.rounds)
  print(f"{config.model.name}, batch {config.batch_size}, {config.model.dtype or 'float32'}")
  for name, cost in costs.items():
    print(
      f"{name:20} {cost.seconds:9.4f} s/step  {cost.ratio:6.2f} x SGD"
      f"  {cost.peak_bytes / 2**20:9.0f} MiB"
    )
  measured, theirs = costs["kfac"].ratio, costs["kfac_jax.Optimizer"].ratio
  print(f"K-FAC predicted from FLOPs {predicted:.2f} x SGD; measured {measured:.2f}")
  print(f"kfac_jax.Optimizer takes {theirs / measured:.2f} times K-FAC's step")


def _input(argv: list[str]) -> None:
  """The input of a config; without one, of a resident set and of a streamed one."""
  del argv
  options = flags.FLAGS
  if options.config is not None:
    console.print_devices()
    _print_input(cli.checked_config(options.config))
    return
  name, *more = options.models or ["mixer_s16"]
  if more:
    raise UserError(f"--models is {name},{','.join(more)}; input takes one model")
  console.print_devices()
  print("resident: the bundled sample")
  resident = config_lib.default()
  resident.model = config_lib.model("mixer_small", patch_size=8)
  _print_input(resident)
  with tempfile.TemporaryDirectory() as directory:
    _print_stream(pathlib.Path(directory), name)


def _print_input(config: ml_collections.ConfigDict) -> dict[str, float]:
  rates = input_benchmark.measure(experiment.build(config), flags.FLAGS.rounds)
  print(f"{config.model.name}, {config.optimizer.name}, batch {config.batch_size}")
  print(f"real data    {rates['real']:.2f} steps/s")
  print(f"fixed batch  {rates['fixed']:.2f} steps/s")
  print(f"ratio        {rates['ratio']:.3f}", flush=True)
  return rates


def _print_stream(directory: pathlib.Path, model: str) -> None:
  options = flags.FLAGS
  size = streaming.write_photos(directory, options.photos)
  print(f"\nstreamed: {options.photos} JPEG files of {size / 1e3:.0f} KB, random areas to 224x224")
  config = streaming.config(directory, model, options.batch_size or 32)
  seconds = streaming.cpu_seconds(config.data)
  print(f"CPU time     {1e3 * seconds:.2f} ms an image", flush=True)
  for workers in options.workers:
    rate = streaming.decoded_per_second(config.data, workers)
    print(f"{workers} workers    {rate:.0f} images/s", flush=True)
  config.data.workers = options.workers[-1]
  wanted = _print_input(config)["fixed"] * config.batch_size
  print(
    f"CPUs         {wanted * seconds:.2f} to decode the {wanted:.0f} images/s of the fixed batch"
  )


def _dispatch(argv: list[str]) -> None:
  del argv
  config = cli.checked_config(flags.FLAGS.config)
  console.print_devices()
  found = dispatch_benchmark.measure(experiment.build(config), flags.FLAGS.rounds)
  print(f"{config.model.name}, {config.optimizer.name}, batch {config.batch_size}")
  for size, (seconds, ratio) in found.items():
    print(f"{size:3} steps a call  {seconds:9.4f} s/step  {ratio:6.3f} x one step a call")


def _train(argv: list[str]) -> None:
  del argv
  options = flags.FLAGS
  names = options.models or ["mixer_s4", "mixer_s16", "mixer_b4", "mixer_b16"]
  batch_size = options.batch_size or 64
  console.print_devices()
  rows = train_benchmark.measure(
    names, options.optimizers, batch_size, options.dtype, options.rounds
  )
  _print_table(batch_size, train_benchmark.HEADER, map(train_benchmark.line, rows))


def _inference(argv: list[str]) -> None:
  del argv
  options = flags.FLAGS
  names = options.models or list(models.VARIANTS)
  for name in names:
    models.fields(name)  # an unknown one is refused before the others are measured
  batch_size = options.batch_size or 32
  console.print_devices()
  rows = inference_benchmark.measure(
    names, batch_size, options.dtype, options.rounds, single_rounds=5 * options.rounds
  )
  _print_table(batch_size, inference_benchmark.HEADER, map(inference_benchmark.line, rows))


def _scaling(argv: list[str]) -> None:
  del argv
  numbers = (1, 8, 64, 256, 1024)
  periods = tuple(optimizers_benchmark.PERIODS.values())
  print(
    f"a model, not a measurement: ImageNet-21k, {scaling_model.IMAGES:,} images,"
    f" {scaling_model.EPOCHS} epochs, batch {scaling_model.BATCH_SIZE}; milliseconds a step"
    f" on H200s ({scaling_model.H200}); K-FAC without the head, periods {periods}"
  )
  for name in flags.FLAGS.models or ["mixer_b16", "mixer_l16"]:
    blocks = scaling_model.blocks_of(name)
    print(f"\n{name}\n\n{scaling_model.table(blocks, numbers, scaling_model.H200, periods)}")
    for what, size in scaling_model.memory(blocks).items():
      print(f"{what}: {size / 2**30:.2f} GiB")


def _compile(argv: list[str]) -> None:
  del argv
  options = flags.FLAGS
  names = options.models or ["mixer_b16", "mixer_l16", "mixer_h14"]
  batch_size = options.batch_size or 2
  compilation.keep_in("")  # what was found on a disk was not compiled
  console.print_devices()
  rows = compile_benchmark.measure(names, options.optimizers, batch_size, options.dtype)
  _print_table(batch_size, compile_benchmark.HEADER, map(compile_benchmark.line, rows), rounds=1)


def _print_table(batch_size: int, header: str, lines: Iterable[str], rounds: int = 0) -> None:
  options = flags.FLAGS
  rounds = rounds or options.rounds
  print(f"batch {batch_size}, {options.dtype}, {rounds} rounds\n\n{header}", flush=True)
  for line in lines:
    print(line, flush=True)


if __name__ == "__main__":
  config_flags.DEFINE_config_file("config", None, "Config file, of input, dispatch and optimizers.")
  flags.DEFINE_integer("rounds", 20, "Timed rounds of each candidate.", lower_bound=1)
  flags.DEFINE_list("models", None, "Models by name, of all that take no config.")
  flags.DEFINE_list("optimizers", ["sgd", "adam", "kfac"], "Optimizers, of train and compile.")
  flags.DEFINE_integer(
    "batch_size",
    None,
    "Default: 64 in train, 32 in inference and streamed input, 2 in compile.",
    lower_bound=1,
  )
  flags.DEFINE_multi_integer(
    "workers", [1, 2], "Numbers of worker processes, of streamed input.", lower_bound=0
  )
  flags.DEFINE_integer("photos", 512, "Photographs, of streamed input.", lower_bound=64)
  flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Of what --models names.")
  commands = {
    "dispatch": _dispatch,
    "input": _input,
    "optimizers": _optimizers,
    "train": _train,
    "inference": _inference,
    "scaling": _scaling,
    "compile": _compile,
  }
  cli.run_commands(commands)
