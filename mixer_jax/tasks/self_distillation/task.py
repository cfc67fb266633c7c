"""Features of images without labels, by DINO: a student learns from an average of itself."""

import functools
import logging
import pathlib
from typing import Any, Callable, Iterable, Mapping

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
from mixer_jax.tasks.task import Aux, Batch, Prediction, Variables, compiled

_PICTURED, _QUERIES = 10_000, 8  # training images among which test images have neighbours
_VIEWED = 6  # images whose views are drawn

_LOG = logging.getLogger(__name__)


class SelfDistillation(ImageTask):
  """DINO (`dino.py`). Labels serve the metric alone, k-NN by the teacher's features.

  A training batch has the views of each image, {"global": [batch, 2, height, width, 3], "local": [batch,
  any, height, width, 3]}; a test batch is {"image": float32, "label": int32 [batch]}. All-MLP models
  have a fixed number of tokens, so small views are resized to the size of the large ones, unless
  `views.local_size` sets another size and the model takes it.

  The collection "teacher" has the teacher's parameters. DINO moves them towards the student's after
  each step. Here they move at the start of the next `loss`, at the rate that "progress" keeps, and
  wherever `teacher` is called in between. "progress" also has the centre, the number of steps, the
  last entropy, and the number of steps in a row with the entropy of a collapse.

  K-FAC takes each view as an example, with the student's logits, divided by its temperature, as
  outputs of a "categorical" likelihood, and the number of teacher's views that it learns from as
  weight. Since the curvature of a cross-entropy does not depend on its target, this Fisher matrix
  (estimation="sampled" or "exact") is the generalised Gauss-Newton matrix of DINO's loss. With
  "empirical" the target is the most probable output of the teacher before its last move, because
  K-FAC's parameters have another structure than the teacher's.
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
    views_are_cut = "since views are cut out of the stored images"
    for field, value, allowed, why in (
      ("data.pad", data.pad, 0, views_are_cut),
      ("data.random_crop", data.random_crop, False, views_are_cut),
      ("data.crop", data.crop, "", views_are_cut),
      ("accum_steps", config.accum_steps, 1, "since the centre is the mean of a whole batch"),
      ("ema_decay", config.ema_decay, 0, "since the teacher is an average already"),
    ):
      if value != allowed:
        raise UserError(f"{field} is {value!r}; allowed: {allowed!r}, {why}")
    patch = options.value(models.BACKBONES, config.model, "patch_size")
    sizes = {"data.image_size": data.image_size, "views.local_size": config.views.local_size}
    for name, size in sizes.items():
      start.check_multiple(name, size, patch, config.model.name)

  @functools.cached_property
  def _loaded(self) -> sources.Loaded:
    self._check_sizes()  # before data are read or downloaded
    loaded = sources.load(self._data, labelled=False)
    for name, split in loaded.splits.items():
      if split.spec["label"].ndim:
        why = "since neighbours vote for one class an image"
        raise UserError(f"the split {name} has sets of labels; allowed: one label an image, {why}")
    if len(loaded.class_names) < 2:
      _LOG.warning("The images have one class: knn is 100%, and the best checkpoint the first")
    augment.check_stored(self._data, loaded.splits["train"].spec["image"].shape)
    return loaded

  def _check_sizes(self) -> None:
    """Raises a UserError if the model does not take views of both sizes with the same parameters."""
    side, local = self._data.image_size, self._views.local_size
    images = lambda size: jnp.zeros((1, *options.pair(size), 3))
    with as_user_error(f"model {self._config.model.name}", ValueError):
      variables = jax.eval_shape(self.model.init, jax.random.key(0), images(side))
    with as_user_error(f"views.local_size is {local}"):  # Flax has exceptions of its own
      jax.eval_shape(self.model.apply, variables, images(local or side))

  @functools.cached_property
  def _steps(self) -> tuple[int, int]:
    """The steps of an epoch, and of the run."""
    config, epoch = self._config, len(self._loaded.splits["train"]) // self._config.batch_size
    return epoch, config.num_steps or max(1, round(config.num_epochs * epoch))

  def init(self, key: jax.Array) -> Variables:
    size = options.pair(self._data.image_size)
    params = self.model.init(key, jnp.zeros((1, *size, 3)))["params"]
    zero, count = jnp.zeros(()), jnp.zeros((), jnp.int32)
    centre = jnp.zeros(self._dino.out_dim)
    progress = dict(centre=centre, rate=zero, entropy=zero, step=count, collapsed=count)
    return {"params": params, "teacher": params, "progress": progress}

  def prepare(self, key: jax.Array, examples: Any, *, train: bool) -> Batch:
    if train:
      return views(key, examples["image"], self._views, self._data)
    images = augment.eval_input(examples["image"], self._data)
    return {"image": images, "label": examples["label"]}

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
    logits = self._student(params, batch, train=True, rngs={"dropout": key})
    losses, count = dino.losses(logits, jax.nn.softmax(targets))
    loss, entropy = WeightedSum.of(losses, count), dino.entropy(targets)
    mean = jnp.mean(outputs, axis=(0, 1))
    centre = how.centre_momentum * progress["centre"] + (1 - how.centre_momentum) * mean
    collapsed = dino.counted(progress["collapsed"], entropy, how.out_dim, how.collapse_steps)
    rate = dino.teacher_rate(step, num_steps, how.momentum)
    after = dict(centre=centre, rate=rate, entropy=entropy, step=step + 1, collapsed=collapsed)
    norm, spread = jnp.linalg.norm(centre), dino.spread(features)
    seen = dict(teacher_entropy=entropy, centre_norm=norm, spread=spread)
    metrics = {"loss": loss} | {name: WeightedSum.of(x) for name, x in seen.items()}
    return loss, Aux(metrics, {"teacher": teacher, "progress": after})

  def _taught(self, teacher: Any, images: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The teacher's features [batch * 2, d] and outputs [batch, 2, K] for its views."""
    features = self._features(teacher["backbone"], images.reshape(-1, *images.shape[2:]))
    outputs = self.model.head.apply({"params": teacher["head"]}, features)
    return features, outputs.reshape(*images.shape[:2], -1)

  def _features(self, params: Any, images: jax.Array) -> jax.Array:
    return self.model.backbone.apply({"params": params}, images)

  def _held(self, params: Any, frozen: jax.Array) -> Any:
    """The parameters, with the head's last layer constant while it is frozen."""
    kernel = params["head"]["last"]["kernel"]
    kernel = jnp.where(frozen, jax.lax.stop_gradient(kernel), kernel)
    return {**params, "head": {**params["head"], "last": {"kernel": kernel}}}

  def _student(self, params: Any, batch: Batch, **given: Any) -> jax.Array:
    """The student's logits of all views, divided by its temperature, [batch, views, K]."""
    parts = [batch["global"], batch["local"]]
    if parts[0].shape[2:] == parts[1].shape[2:]:
      parts = [jnp.concatenate(parts, axis=1)]
    flat = [x.reshape(-1, *x.shape[2:]) for x in parts if x.shape[1]]
    found = [self.model.apply({"params": params}, x, **given) for x in flat]
    found = [y.reshape(len(x), x.shape[1], -1) for x, y in zip(parts, found)]
    return jnp.concatenate(found, axis=1) / self._dino.student_temperature

  def predict(self, variables: Variables, batch: Batch) -> Prediction:
    """The student's logits of test images [batch, K], or of all views [batch * views, K].

    Targets are the most probable outputs of the teacher.
    """
    return self._predict({**variables, "teacher": self.teacher(variables)}, batch)

  def _predict(self, variables: Variables, batch: Batch) -> Prediction:
    is_test, teacher = "image" in batch, variables["teacher"]
    images = batch["image"][:, None] if is_test else batch["global"]
    taught = self._taught(teacher, images)[1] - variables["progress"]["centre"]
    if is_test:
      outputs = self.model.apply({"params": variables["params"]}, batch["image"])
      return Prediction(outputs / self._dino.student_temperature, jnp.argmax(taught[:, 0], axis=-1))
    logits = self._student(variables["params"], batch)
    learns = dino.pairs(logits.shape[1])
    # The last temperature serves all steps: the warm-up's hardly changes the largest output.
    shares = jax.nn.softmax(taught / self._dino.teacher_temperature)
    targets = jnp.argmax(jnp.einsum("btk,tv->bvk", shares, learns.astype(shares.dtype)), axis=-1)
    weights = jnp.broadcast_to(learns.sum(axis=0).astype(jnp.float32), targets.shape)
    return Prediction(logits.reshape(-1, logits.shape[-1]), targets.ravel(), weights.ravel())

  def curvature_view(self) -> Callable[[Variables, Batch], Prediction]:
    return self._predict

  layer_kind = staticmethod(models.layer_kind)
  decayed = staticmethod(models.is_decayed)

  def evaluate(self, variables: Variables, batch: Batch, mask: jax.Array) -> Mapping[str, Sums]:
    return {}  # `host_metrics` has all metrics

  def representations(self, variables: Variables, batch: Batch) -> Mapping[str, jax.Array]:
    """The teacher's "features", float32 [batch, hidden_dim], and the images' "labels"."""
    features = self._features(self.backbone(variables), batch["image"])
    return {"features": features, "labels": batch["label"]}

  def _answers(self, variables: Variables, images: np.ndarray) -> Iterable[Mapping[str, Any]]:
    rows = np.asarray(self._plain_features(variables, images))
    return ({"features": row.tolist()} for row in rows)

  def host_metrics(self, variables: Variables, split: Dataset) -> Mapping[str, float]:
    """The accuracy of k-NN, and maybe of a linear classifier, on the images of `config.knn`."""
    train = self._loaded.splits["train"]
    if split is train:
      raise UserError("the split train has the neighbours; allowed: another split")
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
    """The features [n, d] and labels [n] of some rows of a split."""
    found = [
      (np.asarray(self._plain_features(variables, batch["image"])), batch["label"])
      for batch in batches.each_batch(split, rows, self._config.eval_batch_size)
    ]
    features, labels = (np.concatenate(x)[: len(rows)] for x in zip(*found))
    return features, labels

  @compiled
  def _plain_features(self, variables: Variables, images: np.ndarray) -> jax.Array:
    return self._features(self.backbone(variables), augment.eval_input(images, self._data))

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
    """Writes the teacher's model of images without a head, see `pretrained.save`."""
    statistics = pretrained.Normalization(self._data.mean, self._data.std)
    pretrained.save(
      path, self.backbone(variables), self.model.backbone, statistics, self._data.image_size
    )
