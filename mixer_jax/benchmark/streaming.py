"""Photographs of ImageNet's size: how many are decoded a second, what they cost a step."""

import functools
import pathlib
import time

import ml_collections
import numpy as np
from PIL import Image

from mixer_jax import config as config_lib
from mixer_jax import data
from mixer_jax.data import order, stream

# A photograph of ImageNet has some 500 x 375 pixels and 110 KB in the mean. A small
# image upsampled is smooth: this noise and quality give it about as many bytes.
_SIZE, _NOISE, _QUALITY = (500, 375), 12.0, 95
_SECONDS = 3.0  # that decoding is timed for, at least
_BATCH = 64


def write_photos(directory: pathlib.Path, num: int) -> float:
  """Writes a folder data set of JPEG files made from the bundled sample.

  Args:
    directory: gets `num` training and `num` // 8 test images in two classes.
    num: of training images.

  Returns:
    Their mean size in bytes.
  """
  sample = data.load(config_lib.data("sample"))
  rng = np.random.default_rng(0)
  sizes = []
  for base, count in (("train", num), ("test", num // 8)):
    for i in range(count):
      folder = directory / base / str(i % 2)
      folder.mkdir(parents=True, exist_ok=True)
      image = Image.fromarray(sample.train.images[i % len(sample.train)])
      pixels = np.asarray(image.resize(_SIZE, Image.Resampling.BICUBIC), np.float32)
      pixels += rng.normal(0, _NOISE, (*pixels.shape[:2], 1))
      path = folder / f"{i}.jpg"
      Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=_QUALITY)
      sizes.append(path.stat().st_size)
  return float(np.mean(sizes))


def config(directory: pathlib.Path, model: str, batch_size: int) -> ml_collections.ConfigDict:
  """A config that trains a model on random areas of such photographs, with SGD.

  Args:
    directory: see `write_photos`.
    model: its name.
    batch_size: images a step.
  """
  made = config_lib.default()
  made.model = config_lib.model(model)
  made.batch_size = batch_size
  made.data = config_lib.data("folder")
  made.data.update(dir=str(directory), crop="inception", resize=256, image_size=224, pad=0)
  return made


def decoded_per_second(photos: ml_collections.ConfigDict, workers: int) -> float:
  """Random areas that worker processes decode and hand over in a second.

  Args:
    photos: the `data` part of a config.
    workers: how many; 0: a thread of this process.
  """
  photos = photos.copy_and_resolve_references()
  photos.workers = workers
  images = data.load(photos).train.images
  ids = functools.partial(order.train_indices, 0, num_examples=len(images), batch_size=_BATCH)
  batches = stream.Stream(images, ids, np.arange(_BATCH), seed=0)
  per_epoch = len(images) // _BATCH
  # What was decoded ahead while workers started is taken before the clock starts.
  ahead = 2 * max(workers, 1) * images.read_ahead // _BATCH + 1
  start, i = None, 0
  while start is None or time.perf_counter() - start < _SECONDS:
    if i == ahead:
      start = time.perf_counter()
    batches.take(1 + i // per_epoch, i % per_epoch, 1)
    i += 1
  seconds = time.perf_counter() - start
  batches.close()
  return (i - ahead) * _BATCH / seconds


def cpu_seconds(photos: ml_collections.ConfigDict) -> float:
  """CPU time that one image takes to be read, decoded, cropped and resized.

  Other processes on the same CPUs hardly change it, as they do a rate.

  Args:
    photos: the `data` part of a config.
  """
  images = data.load(photos).train.images
  start = time.process_time()
  for i in range(_BATCH):
    images.read(i, order.crop_rng(0, 1, i))
  return (time.process_time() - start) / _BATCH
