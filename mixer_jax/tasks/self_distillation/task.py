"""Features of images without labels: a student learns from an average of itself (DINO)."""

import functools
import logging
import pathlib
from typing import Any, Callable, Iterable, Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from mixer_jax import models, options, pretrained
from mixer_jax.data.dataset import Dataset
from mixer_jax.errors import UserError, as_user_error
from mixer_jax.images import augment, sources
from mixer_jax.images.image_data import ImageData
from mixer_jax.images.views import Views, views
from mixer_jax.runtime import mesh as mesh_lib
from mixer_jax.tasks.images import batches, probes, start
from mixer_jax.tasks.images.image_task import ImageTask
from mixer_jax.tasks.images.probes import Knn
from mixer_jax.tasks.metrics import Metric, Sums, WeightedSum
from mixer_jax.tasks.self_distillation import dino, pictures
from mixer_jax.tasks.self_distillation.dino import Dino
from mixer_jax.tasks.task import Aux, Batch, Prediction, Variables

_PICTURED, _QUERIES = 10_000, 8  # training images that neighbours are sought in, and test images
_VIEWED = 6  # images whose views are drawn

_LOG = logging.getLogger(__name__)


class SelfDistillation(ImageTask):
  """DINO (`dino.py`); labels are for the metric alone, k-NN by the features of the teacher.

  A training batch has the views of each image, {"global": [batch, 2, side, side, 3], "local": [batch,
  any, side, side, 3]}; a test batch {"image": float32, "label": int32 [batch]}. All-MLP models have
  a fixed number of tokens, so small views are resized to the size of the large ones, unless
  `views.local_size` says otherwise for a model that fits.

  The collection "teacher" has the teacher's parameters. DINO moves them towards the student's after
  each step: that happens at the start of the next `loss`, at the rate that "progress" keeps, and
  wherever the teacher is asked for in between (`teacher`). "progress" also has the centre, the
  number of steps, the last entropy, and how many of a row were those of a collapse.

  K-FAC sees each view as an example of its own with the student's logits, divided by its
  temperature, as outputs of a "categorical" likelihood. Its weight is the number of the teacher's
  views that it learns from. Since the curvature of a cross-entropy does not depend on its target,
  this Fisher matrix (estimation="sampled" or "exact") is the generalised Gauss-Newton matrix of
  DINO's loss. With "empirical" the target is the most probable output of the teacher before
  its last move: K-FAC's parameters have another structure than the teacher's.
  """

  options = {
    "model": models.BACKBONES,
    "data": functools.partial(ImageData, pad=0),
    "views": Views,
    "dino": Dino,
    "knn": Knn,
  }
  metrics = (
    Metric("knn", higher_is_better=True, percent=True),
    Metric("loss", higher_is_better=False, unit="nats"),
    Metric("linear", higher_is_better=True, percent=True),
    Metric("teacher_entropy", higher_is_better=True, unit="nats"),
  )
  likelihood = "categorical"

  def __init__(self, config: ml_collections.ConfigDict):
    self._config, self._data = config, options.made(ImageData, config.data)
    self._views, self._dino, self._knn = (
      options.made(cls, config[name])
      for name, cls in (("views", Views), ("dino", Dino), ("knn", Knn))
    )
    self.repeats = self._data.repeats
    backbone = models.BACKBONES[config.model.name](num_classes=0, **options.given(config.model))
    head = dino.Head(self._dino.hidden_dim, self._dino.bottleneck_dim, self._dino.out_dim)
    self.model = dino.Network(backbone, head)

  @classmethod
  def check(cls, config: ml_collections.ConfigDict) -> None:
    (data := options.made(ImageData, config.data)).check()
    options.made(Views, config.views).check()
    for name, other in (("pad", 0), ("random_crop", False), ("crop", "")):
      if (value := getattr(data, name)) != other:
        why = f"views are cut out of the stored images; set it to {other!r}"
        raise UserError(f"data.{name} is {value!r}: {why}")
    if data.test_labels:
      why = "neighbours vote for one class an image; set it to ''"
      raise UserError(f"data.test_labels is {data.test_labels!r}: {why}")
    if config.accum_steps > 1:
      why = "allowed: 1, since the centre is the mean of a whole batch"
      raise UserError(f"accum_steps is {config.accum_steps}; {why}")
    if config.ema_decay:
      why = "allowed: 0, since the teacher, which is evaluated, is an average already"
      raise UserError(f"ema_decay is {config.ema_decay}; {why}")
    patch = options.value(models.BACKBONES, config.model, "patch_size")
    sizes = {"data.image_size": data.image_size, "views.local_size": config.views.local_size}
    for name, size in sizes.items():
      start.check_multiple(name, size, patch, config.model.name)

  @functools.cached_property
  def _loaded(self) -> sources.Loaded:
    self._check_model()  # a mistake in the model is told before data are read or downloaded
    loaded = sources.load(self._data, labelled=False)
    for name, split in loaded.splits.items():
      if split.spec["label"].ndim:
        raise UserError(
          f"the split {name} has sets of labels, but neighbours vote for one class an image;"
          " allowed: test sets of one label an image"
        )
    if len(loaded.class_names) < 2:
      _LOG.warning("The images have one class: knn is 100%, and the best checkpoint the first")
    augment.check_stored(self._data, loaded.splits["train"].spec["image"].shape)
    return loaded

  def _check_model(self) -> None:
    name, sizes = self._config.model.name, (self._data.image_size, self._views.local_size)
    shapes = []
    for side in filter(None, sizes):
      with as_user_error(f"model {name}", ValueError):
        init = functools.partial(self.model.init, images=jnp.zeros((1, side, side, 3)))
        shapes.append(jax.tree.map(jnp.shape, jax.eval_shape(init, jax.random.key(0))))
    if shapes[0] != shapes[-1]:
      why = f"the parameters of {name} fit {sizes[0]} pixels alone; allowed: 0"
      raise UserError(f"views.local_size is {sizes[1]}: {why}")

  @functools.cached_property
  def _steps(self) -> tuple[int, int]:
    """Steps of an epoch, and of the run."""
    config, epoch = self._config, len(self._loaded.splits["train"]) // self._config.batch_size
    return epoch, config.num_steps or max(1, round(config.num_epochs * epoch))

  def init(self, key: jax.Array) -> Variables:
    side = self._data.image_size
    params = self.model.init(key, jnp.zeros((1, side, side, 3)))["params"]
    zero, count = jnp.zeros(()), jnp.zeros((), jnp.int32)
    progress = dict(centre=jnp.zeros(self._dino.out_dim), rate=zero, entropy=zero)
    progress |= dict(step=count, collapsed=count)
    return {"params": params, "teacher": params, "progress": progress}

  def prepare(self, key: jax.Array, examples: Any, *, train: bool) -> Batch:
    if train:
      return views(key, examples["image"], self._views, self._data)
    return {
      "image": augment.eval_input(examples["image"], self._data),
      "label": examples["label"],
    }

  def teacher(self, variables: Variables) -> Any:
    """The teacher's parameters after the last step, {"backbone": ..., "head": ...} (traceable)."""
    return dino.moved(variables["teacher"], variables["params"], variables["progress"]["rate"])

  def backbone(self, variables: Variables) -> Any:
    """The parameters of the teacher's model of images, without a head."""
    return self.teacher(variables)["backbone"]

  def loss(self, variables: Variables, batch: Batch, key: jax.Array) -> tuple[WeightedSum, Aux]:
    how, progress, teacher = self._dino, variables["progress"], self.teacher(variables)
    step, (epoch, num_steps) = progress["step"], self._steps
    features, outputs = self._taught(teacher, batch["global"])
    temperature = dino.teacher_temperature(step, how.temperature_epochs * epoch, how)
    targets = jax.lax.stop_gradient(outputs - progress["centre"]) / temperature
    params = self._held(variables["params"], step < how.freeze_epochs * epoch)
    logits = self._student(self.model, params, batch, train=True, rngs={"dropout": key})
    losses, count = dino.losses(logits, jax.nn.softmax(targets))
    loss, entropy = WeightedSum.of(losses, count), dino.entropy(targets)
    mean = jnp.mean(outputs, axis=(0, 1))
    centre = how.centre_momentum * progress["centre"] + (1 - how.centre_momentum) * mean
    collapsed = dino.counted(progress["collapsed"], entropy, how.out_dim, how.collapse_steps)
    rate = dino.teacher_rate(step, num_steps, how.momentum)
    after = dict(centre=centre, rate=rate, entropy=entropy, step=step + 1, collapsed=collapsed)
    seen = dict(teacher_entropy=entropy, centre_norm=jnp.linalg.norm(centre))
    seen |= dict(spread=dino.spread(features))
    metrics = {"loss": loss} | {name: WeightedSum.of(x) for name, x in seen.items()}
    return loss, Aux(metrics, {"teacher": teacher, "progress": after})

  def _taught(self, teacher: Any, images: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Features of the teacher [batch * 2, d] and outputs [batch, 2, K] for its views."""
    features = self._features(teacher["backbone"], images.reshape(-1, *images.shape[2:]))
    outputs = self.model.head.apply({"params": teacher["head"]}, features)
    return features, outputs.reshape(*images.shape[:2], -1)

  def _features(self, params: Any, images: jax.Array) -> jax.Array:
    return self.model.backbone.apply({"params": params}, images)

  def _held(self, params: Any, frozen: jax.Array) -> Any:
    """The parameters; the head's last layer gets no gradient where it is frozen."""
    kernel = params["head"]["last"]["kernel"]
    kernel = jnp.where(frozen, jax.lax.stop_gradient(kernel), kernel)
    return {**params, "head": {**params["head"], "last": {"kernel": kernel}}}

  def _student(self, model: nn.Module, params: Any, batch: Batch, **given: Any) -> jax.Array:
    """Logits of all views, divided by the temperature: [batch, views, K]."""
    parts = [batch["global"], batch["local"]]
    if parts[0].shape[2:] == parts[1].shape[2:]:
      parts = [jnp.concatenate(parts, axis=1)]
    flat = [x.reshape(-1, *x.shape[2:]) for x in parts if x.shape[1]]
    found = [model.apply({"params": params}, x, **given) for x in flat]
    found = [y.reshape(len(x), x.shape[1], -1) for x, y in zip(parts, found)]
    return jnp.concatenate(found, axis=1) / self._dino.student_temperature

  def predict(self, variables: Variables, batch: Batch) -> Prediction:
    """The student's logits of test images [batch, K], or of all views [batch * views, K].

    Targets are the most probable outputs of the teacher, see the class.
    """
    return self._predict({**variables, "teacher": self.teacher(variables)}, batch)

  def _predict(self, variables: Variables, batch: Batch) -> Prediction:
    is_test, teacher = "image" in batch, variables["teacher"]
    images = batch["image"][:, None] if is_test else batch["global"]
    taught = self._taught(teacher, images)[1] - variables["progress"]["centre"]
    if is_test:
      outputs = self.model.apply({"params": variables["params"]}, batch["image"])
      return Prediction(outputs / self._dino.student_temperature, jnp.argmax(taught[:, 0], axis=-1))
    logits = self._student(self.model, variables["params"], batch)
    learns = dino.pairs(logits.shape[1])
    # At the last temperature: that of the warm-up hardly changes which output has the most.
    shares = jax.nn.softmax(taught / self._dino.teacher_temperature)
    targets = jnp.argmax(jnp.einsum("btk,tv->bvk", shares, learns.astype(shares.dtype)), axis=-1)
    weights = jnp.broadcast_to(learns.sum(axis=0).astype(jnp.float32), targets.shape)
    return Prediction(logits.reshape(-1, logits.shape[-1]), targets.ravel(), weights.ravel())

  def curvature_view(self) -> Callable[[Variables, Batch], Prediction]:
    return self._predict

  layer_kind = staticmethod(models.layer_kind)
  decayed = staticmethod(models.is_decayed)

  def evaluate(self, variables: Variables, batch: Batch, mask: jax.Array) -> Mapping[str, Sums]:
    """No sums: k-NN is computed by `host_metrics`."""
    return {}

  def representations(self, variables: Variables, batch: Batch) -> Mapping[str, jax.Array]:
    """ "features": those of the teacher, float32 [batch, hidden_dim]; "labels": the images' own."""
    features = self._features(self.backbone(variables), batch["image"])
    return {"features": features, "labels": batch["label"]}

  def _answers(self, variables: Variables, images: np.ndarray) -> Iterable[Mapping[str, Any]]:
    rows = np.asarray(self._plain_features(variables, images))
    return ({"features": row.tolist()} for row in rows)

  def host_metrics(self, variables: Variables, split: Dataset) -> Mapping[str, float]:
    """The accuracy of k-NN, and maybe a linear classifier, by the images that `config.knn` says."""
    train = self._loaded.splits["train"]
    if split is train:
      raise UserError(
        "the split train is the one that neighbours are sought in; allowed: another split"
      )
    variables, _ = mesh_lib.of_process(dict(variables))  # each process computes all of it
    features, labels = self._labelled(variables, train, batches.spaced(train, self._knn.images))
    queries, wanted = self._labelled(variables, split, batches.spaced(split))
    classes = len(self.class_names)
    found = {"knn": probes.knn(features, labels, queries, self._knn, classes)}
    if self._knn.linear:
      found["linear"] = probes.linear(features, labels, classes)(queries)
    return {name: float(np.mean(answers == wanted)) for name, answers in found.items()}

  def _labelled(
    self, variables: Variables, split: Dataset, rows: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray]:
    """Features [n, d] and labels [n] of some rows of a split."""
    found = [
      (np.asarray(self._plain_features(variables, batch["image"])), batch["label"])
      for batch in batches.each_batch(split, rows, self._config.eval_batch_size)
    ]
    features, labels = (np.concatenate(x)[: len(rows)] for x in zip(*found))
    return features, labels

  @functools.cached_property
  def _plain_features(self) -> Callable[[Variables, np.ndarray], jax.Array]:
    def features(variables, images):
      return self._features(self.backbone(variables), augment.eval_input(images, self._data))

    return jax.jit(features)

  def complaint(self, variables: Variables) -> str:
    return dino.collapse(variables["progress"], self._dino)

  def pictures(self, variables: Variables, split: Dataset) -> Mapping[str, Any]:
    train, shown = self._loaded.splits["train"], batches.spaced(split, _QUERIES)
    rows = batches.spaced(train, _PICTURED)
    features, labels = self._labelled(variables, train, rows)
    queries, wanted = self._labelled(variables, split, shown)
    near, places = map(
      np.asarray, probes.nearest(features, queries, min(len(rows), pictures.NEIGHBOURS))
    )
    [found] = batches.each_batch(train, rows[places].ravel(), places.size)
    [images] = batches.each_batch(split, shown, len(shown))
    found = found["image"].reshape(*places.shape, *found["image"].shape[1:])
    others = (wanted, found, labels[places], near, self.class_names)
    return {"neighbours": pictures.draw_neighbours(images["image"], *others)}

  def prepared_pictures(self, key: jax.Array) -> Mapping[str, Any]:
    train = self._loaded.splits["train"]
    [examples] = batches.each_batch(train, batches.spaced(train, _VIEWED), _VIEWED)
    batch = jax.jit(lambda key: self.prepare(key, examples, train=True))(key)
    pixels = lambda x: np.asarray(x).swapaxes(0, 1) * self._data.std + self._data.mean
    shown = [*pixels(batch["global"]), *pixels(batch["local"])]
    return {"views": pictures.draw_views(examples["image"], shown)}

  def export(self, variables: Variables, path: pathlib.Path) -> None:
    """Writes the teacher's model of images, without a head, see `pretrained.save`."""
    statistics = pretrained.Normalization(self._data.mean, self._data.std)
    pretrained.save(path, self.backbone(variables), self.model.backbone, statistics)
