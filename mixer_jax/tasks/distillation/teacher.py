"""Teachers: runs of image classification, or public weights."""

from typing import Any, Mapping, NamedTuple, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from mixer_jax import models, pretrained
from mixer_jax.errors import UserError
from mixer_jax.images.image_data import ImageData
from mixer_jax.options import Size, as_size, pair
from mixer_jax.paths import remembered
from mixer_jax.pretrained import catalog
from mixer_jax.tasks.image_classification.task import ImageClassification
from mixer_jax.tasks.images import start
from mixer_jax.tasks.task import ReadRun, Variables, find

# Describing a teacher and reading it are two calls: the file is read once.
_weights = remembered(pretrained.read)


class Teacher(NamedTuple):
  """What is needed to build a teacher and to show it images."""

  name: str  # of `models.VARIANTS`
  fields: Mapping[str, Any]  # of the model
  image_size: Size
  mean: Sequence[float]
  std: Sequence[float]
  loss: str = "softmax"  # the loss of its own training

  def build(self, num_classes: int) -> nn.Module:
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in self.fields.items()}
    return models.build(self.name, num_classes, **fields)

  def seen(self, images: jax.Array, own: ImageData) -> jax.Array:
    """Images that are normalised by `own`, as the teacher wants them: its statistics, its size."""
    mean, std, size = np.float32(self.mean), np.float32(self.std), pair(self.image_size)
    if not np.allclose((mean, std), (own.mean, own.std), rtol=0, atol=1e-6):
      images = (images * np.float32(own.std) + np.float32(own.mean) - mean) / std
    if images.shape[1:3] != size:
      images = jax.image.resize(images, (len(images), *size, 3), "bilinear")
    return images


def describe(path: str, model: str, own: ImageData) -> Teacher:
  """The teacher in a run's directory, or in a file of weights; a UserError if there is none.

  Args:
    path: the directory; or a file, an address or a name, as `pretrained.read` takes them.
    model: name of the model of a file that the catalogue does not know.
    own: the student's data; a file without statistics of pixels takes theirs. Images have the size
      that the weights mix the patches of; of weights that take any, that of the model in the
      catalogue, or the student's.
  """
  if start.is_run(path):
    return _of_run(path)
  weights = _weights(path)
  entry = catalog.find(path) or catalog.find_by_sha256(weights.sha256)
  if (name := model or (entry.model if entry else "")) not in models.VARIANTS:
    allowed = f"the model of {path}, a name of models.VARIANTS"
    raise UserError(f"distillation.teacher_model is {model!r}; allowed: {allowed}")
  own_size = models.image_size(name) if entry else own.image_size
  size = as_size(weights.only_size) if weights.only_size else own_size
  told_by_file = weights.model_fields(size) | dict(entry.overrides if entry else {})
  if weights.patch_size:
    told_by_file["patch_size"] = weights.patch_size
  fields = {k: told_by_file.get(k, v) for k, v in models.fields(name).items()}
  return Teacher(name, fields, size, *(weights.normalization or (own.mean, own.std)))


def _of_run(path: str) -> Teacher:
  run = start.run_model(path)
  if not issubclass(find(run.task), ImageClassification):
    raise UserError(f"{path!r} is a run of task {run.task}; allowed: one of image classification")
  fields = models.fields(run.name) | run.fields
  return Teacher(run.name, fields, run.image_size, run.mean, run.std, run.loss)


def read(
  path: str, shapes: Variables, class_names: Sequence[str], read_run: ReadRun
) -> dict[str, Any]:
  """The variables of a teacher, of these shapes, on the host.

  A UserError if it is for other classes: their number, or their names if the teacher is a run that
  has recorded them.
  """
  if start.is_run(path):
    _, variables = read_run(path)
    found = {name: variables[name] for name in shapes}
    _check_names(path, class_names)
    number = found["params"]["head"]["bias"].size
  else:
    weights, found = _weights(path), None
    _weights.forget()  # they may take gigabytes
    number = weights.num_classes
  if number != len(class_names):
    raise UserError(f"{path}: the teacher has {number} classes, the data {len(class_names)}")
  return found or weights.fit_variables(shapes)


def _check_names(path: str, own: Sequence[str]) -> None:
  names = start.class_names(path)
  differing = [pair for pair in zip(names, own) if pair[0] != pair[1]]
  if differing and len(names) == len(own):
    its, mine = differing[0]
    raise UserError(f"{path}: the teacher has the class {its!r} where the data have {mine!r}")


def absent(shapes: Any) -> Any:
  """Variables that no teacher has: a run that has read none stops at its first step."""
  return jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), shapes)
