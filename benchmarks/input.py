"""The cost of real data in a step: of a resident set, and of photographs decoded in each epoch."""

import pathlib
import statistics
import tempfile
import time
from typing import Any

import ml_collections
import numpy as np
from PIL import Image

from benchmarks import steps
from benchmarks.timing import ratio, take_turns
from mixer_jax import config as config_lib
from mixer_jax import experiment, tasks
from mixer_jax.data import order, stream
from mixer_jax.data.dataset import Dataset, Streamed
from mixer_jax.experiment import Experiment
from mixer_jax.runtime import cli, devices

# A photograph of ImageNet has some 500 x 375 pixels and 110 KB in the mean. A small
# image upsampled is smooth: this noise and quality give it about as many bytes.
_SIZE, _NOISE, _QUALITY = (500, 375), 12.0, 95
_SECONDS = 3.0  # of decoding that are timed, at least
_BATCH = 64


def measure(run: Experiment, rounds: int) -> dict[str, float]:
  """Steps per second with real data, and on one fixed batch on the device.

  The fixed batch is prepared once, before the clock starts; real data are gathered and
  prepared in every step and differ in every call.

  Args:
    run: the experiment.
    rounds: calls timed of each.

  Returns:
    `real`, `fixed` (median steps per second) and `ratio` of real over fixed.
  """
  real = steps.Real(run).start()
  fixed = steps.Fixed(run, steps.batch(run), real.length).start()
  seconds = take_turns({"real": real, "fixed": fixed}, rounds)
  rates = {name: real.length / statistics.median(s) for name, s in seconds.items()}
  return rates | {"ratio": ratio(seconds["fixed"], seconds["real"])}


def write_photos(directory: pathlib.Path, num: int) -> float:
  """Writes a folder data set of JPEG files made from the bundled sample.

  Args:
    directory: gets `num` training and `num` // 8 test images in two classes.
    num: of training images.

  Returns:
    Their mean size in bytes.
  """
  images = _train_split(config_lib.default()).arrays()["image"]
  rng = np.random.default_rng(0)
  sizes = []
  for base, count in (("train", num), ("test", num // 8)):
    for i in range(count):
      folder = directory / base / str(i % 2)
      folder.mkdir(parents=True, exist_ok=True)
      image = Image.fromarray(images[i % len(images)])
      pixels = np.asarray(image.resize(_SIZE, Image.Resampling.BICUBIC), np.float32)
      pixels += rng.normal(0, _NOISE, (*pixels.shape[:2], 1))
      path = folder / f"{i}.jpg"
      Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=_QUALITY)
      sizes.append(path.stat().st_size)
  return float(np.mean(sizes))


def photo_config(directory: pathlib.Path, model: str, batch_size: int) -> ml_collections.ConfigDict:
  """A config that trains a model on random areas of such photographs, with SGD.

  Args:
    directory: see `write_photos`.
    model: its name.
    batch_size: images a step.
  """
  made = config_lib.default(model=model)
  made.batch_size = batch_size
  made.data = config_lib.data("folder", like="cifar10")
  made.data.update(dir=str(directory), crop="inception", resize=256, image_size=224, pad=0)
  return made


def photos(config: ml_collections.ConfigDict, workers: int = 0) -> Streamed:
  """The training split of a config, decoded by some worker processes."""
  config = config.copy_and_resolve_references()
  config.data.workers = workers
  return _train_split(config)


def _train_split(config: ml_collections.ConfigDict) -> Dataset:
  return tasks.find(config.task)(config).datasets()["train"]


def decoded_per_second(images: Streamed) -> float:
  """Random areas that a split's workers decode and hand over in a second."""
  batches = stream.Stream(images, order.Order(0, len(images), _BATCH), np.arange(_BATCH), seed=0)
  # The clock starts once the images are taken that were decoded while workers started.
  ahead = 2 * max(images.workers, 1) * images.read_ahead // _BATCH + 1
  start, i = None, 0
  while start is None or time.perf_counter() - start < _SECONDS:
    if i == ahead:
      start = time.perf_counter()
    batches.take(i, 1)
    i += 1
  seconds = time.perf_counter() - start
  batches.close()
  return (i - ahead) * _BATCH / seconds


def cpu_seconds(images: Streamed) -> float:
  """CPU time to read, decode, crop and resize one image.

  Other processes on the same CPUs hardly change it; they do change a rate.
  """
  start = time.process_time()
  for i in range(_BATCH):
    images.read(i, order.crop_rng(0, 1, i))
  return (time.process_time() - start) / _BATCH


def main(options: Any) -> None:
  """The input of a config; without one, of a resident set and of a streamed one."""
  if options.config is not None:
    config = cli.checked_config(options.config)
    devices.print_line()
    _print_rates(config, options.rounds)
    return
  devices.print_line()
  print("resident: the bundled sample")
  resident = config_lib.default()
  resident.model = config_lib.model("mixer_small", patch_size=8)
  _print_rates(resident, options.rounds)
  with tempfile.TemporaryDirectory() as directory:
    size = write_photos(pathlib.Path(directory), options.photos)
    print(f"\nstreamed: {options.photos} JPEG files of {size / 1e3:.0f} KB, areas to 224x224")
    for name in options.models or ["mixer_s16"]:
      _print_streamed(photo_config(directory, name, options.batch_size or 32), options)


def _print_rates(config: ml_collections.ConfigDict, rounds: int) -> dict[str, float]:
  rates = measure(experiment.build(config), rounds)
  print(f"{steps.title(config)}, {config.optimizer.name}")
  print(f"real data    {rates['real']:.2f} steps/s")
  print(f"fixed batch  {rates['fixed']:.2f} steps/s")
  print(f"ratio        {rates['ratio']:.3f}", flush=True)
  return rates


def _print_streamed(config: ml_collections.ConfigDict, options: Any) -> None:
  seconds = cpu_seconds(photos(config))
  print(f"CPU time     {1e3 * seconds:.2f} ms an image", flush=True)
  for workers in options.workers:
    rate = decoded_per_second(photos(config, workers))
    print(f"{workers} workers    {rate:.0f} images/s", flush=True)
  config.data.workers = options.workers[-1]
  wanted = _print_rates(config, options.rounds)["fixed"] * config.batch_size
  print(f"CPUs         {wanted * seconds:.2f} decode the {wanted:.0f} images/s of the fixed batch")
