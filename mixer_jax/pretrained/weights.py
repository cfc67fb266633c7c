"""Weights in this library's names, with the fields that their peer's code fixes."""

import dataclasses
import logging
import math
import os
import pathlib
import re
from typing import Any, NamedTuple, Sequence

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from mixer_jax import models
from mixer_jax.errors import UserError, as_user_error
from mixer_jax.options import Size, pair
from mixer_jax.paths import user_path
from mixer_jax.pretrained import catalog, containers, files, layouts
from mixer_jax.pretrained import fit as fit_lib
from mixer_jax.pretrained.catalog import Normalization

_LOG = logging.getLogger(__name__)

# Collections of a model. Their arrays have different names, so that a layer's stand side by side.
_COLLECTIONS = ("params", "batch_stats")

# Fields that parameters do not show, with their types: models with equal trees may
# differ in them.
UNSEEN = dict(gelu=str, layer_norm_epsilon=float, gate_epsilon=float)
UNSEEN |= dict(gating=str, normalization=str, token_mixer=str)


@dataclasses.dataclass(frozen=True)
class Weights:
  """Weights of a file or of a run, in this library's names; `read` makes them.

  Attributes:
    source: path, address or name, as it was given.
    sha256: SHA-256 of the file, in hexadecimal digits; "" of a run.
    layout: the kind of file, such as "linen" (Google's Mixer) or "timm_mixer".
    arrays: float32 arrays by path, as "MixerBlock_0/token_mixing/Dense_0/kernel".
    fields: fields of the model that the code of the weights fixes, such as GELU and epsilons.
    normalization: normalization of the pixels they were trained on; None: not known.
    model: name in `models.VARIANTS`, of a run or of a file in the catalog; "": not known.
    image_size: side of the images, or height and width; 0: not known.
    class_names: names of the classes of a run; (): not known.

  Example:
    ```python
    import jax
    import jax.numpy as jnp
    from mixer_jax import models, pretrained

    model = models.build("mixer_s4", num_classes=10, num_blocks=1, hidden_dim=8)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 32, 32, 3)))["params"]
    params = jax.tree.map(lambda x: jnp.zeros(x.shape), shapes)
    pretrained.save("mine.npz", params, model)
    weights = pretrained.read("mine.npz")
    assert (weights.num_classes, weights.num_tokens) == (10, 64)
    ```
  """

  source: str
  sha256: str
  layout: str
  arrays: dict[str, np.ndarray]
  fields: dict[str, Any]
  normalization: Normalization | None
  model: str = ""
  image_size: Size = 0
  class_names: tuple[str, ...] = ()

  @property
  def num_classes(self) -> int:
    """Width of the head; 0 if the file has none."""
    shape = self._shapes.get("head/kernel", ())
    return shape[1] if len(shape) == 2 else 0

  @property
  def num_tokens(self) -> int:
    """Tokens that the weights mix; 0 if they mix any number."""
    return fit_lib.tokens_of(self._shapes)

  @property
  def patch_size(self) -> Size:
    """The size of the stem's kernel, that is of a patch in pixels; 0 if the file has no such stem."""
    return fit_lib.patch_of(self._shapes)

  @property
  def grid(self) -> tuple[int, ...]:
    """Rows and columns of the patches that the weights mix; () if they mix any, or are not known."""
    return (
      fit_lib.grid_of(self.num_tokens, self.image_size, self.patch_size) if self.num_tokens else ()
    )

  @property
  def only_size(self) -> tuple[int, ...]:
    """Height and width of the only images that the weights take; () if they do not show it."""
    return tuple(n * side for n, side in zip(self.grid, pair(self.patch_size)))

  @property
  def _shapes(self) -> dict[str, tuple[int, ...]]:
    return {path: array.shape for path, array in self.arrays.items()}

  def model_fields(self, image_size: Size, resize_tokens: str = "") -> dict[str, Any]:
    """Returns the fields with which to build the model for images of a size.

    These are `fields` and, for "block_diagonal" at a higher resolution, the width of a Mixer's
    token mixing.

    Args:
      image_size: side of the images in pixels, or height and width.
      resize_tokens: as for `fit`.

    Returns:
      Values by field.

    Raises:
      UserError: the resolution does not allow "block_diagonal".

    Example:
      After the example of `Weights`:

      ```python
      fields = weights.model_fields(image_size=32)
      model = models.build("mixer_s4", 10, num_blocks=1, hidden_dim=8, **fields)
      ```
    """
    hidden = self._shapes.get("MixerBlock_0/token_mixing/Dense_0/bias")
    if resize_tokens != fit_lib.BLOCK_DIAGONAL or not (hidden and self.only_size):
      return dict(self.fields)
    new = tuple(n // side for n, side in zip(pair(image_size), pair(self.patch_size)))
    tiles = fit_lib.times(self.grid, new)
    return self.fields | {"tokens_mlp_dim": hidden[0] * math.prod(tiles)}

  def fit(
    self,
    template: Any,
    resize_tokens: str = "",
    class_names: Sequence[str] = (),
    grid: tuple[int, ...] = (),
  ) -> Any:
    """Fits the weights to a model: returns a tree of float32 arrays like `template`.

    Shapes do not show GELU and epsilons: build the model with `model_fields`, as `load` does. A
    model with another number of classes, or with other `class_names` where both are known, gets a
    fresh zero head, which is logged.

    Args:
      template: the shapes of the model's parameters.
      resize_tokens: what to do where the model mixes another number of tokens, one of `RESIZES`;
        "": raise an error.
      class_names: names of the model's classes; (): not known.
      grid: rows and columns of the model's patches; (): a square of its number.

    Returns:
      The parameters.

    Raises:
      UserError: parameters are missing, left over or of the wrong shape (one message names them
        all), or `resize_tokens` does not allow the number of tokens.

    Example:
      After the example of `Weights`:

      ```python
      params = weights.fit(shapes)
      ```
    """
    unrolled = jax.eval_shape(models.unrolled, template)
    flat: dict[str, Any] = traverse_util.flatten_dict(unrolled, sep="/")
    shapes = {path: x.shape for path, x in flat.items()}
    arrays = fit_lib.with_tokens(self.source, self.arrays, shapes, resize_tokens, self.grid, grid)
    others = bool(self.class_names and class_names) and self.class_names != tuple(class_names)
    arrays = fit_lib.with_head(self.source, arrays, shapes, others)
    fit_lib.compare(self.source, arrays, shapes, layouts.LAYOUTS[self.layout].theirs)
    params = traverse_util.unflatten_dict({path: arrays[path] for path in shapes}, sep="/")
    return params if unrolled.keys() == template.keys() else models.stacked(params)

  def fit_variables(
    self,
    template: Any,
    resize_tokens: str = "",
    class_names: Sequence[str] = (),
    grid: tuple[int, ...] = (),
  ) -> dict[str, Any]:
    """Fits the weights as `fit` does, to all variables of a model: parameters and batch statistics.

    Args:
      template: the shapes of the model's variables.
      resize_tokens: as for `fit`.
      class_names: as for `fit`.
      grid: as for `fit`.

    Returns:
      {"params": ...}, with "batch_stats" if the template has them.

    Raises:
      UserError: as for `fit`.

    Example:
      After the example of `Weights`:

      ```python
      variables = weights.fit_variables({"params": shapes})
      ```
    """
    fitted = self.fit(beside(template), resize_tokens, class_names, grid)
    found = traverse_util.flatten_dict(fitted)
    own = {k: traverse_util.flatten_dict(template[k]) for k in _COLLECTIONS if k in template}
    return {k: traverse_util.unflatten_dict({p: found[p] for p in v}) for k, v in own.items()}


def beside(variables: Any) -> dict[str, Any]:
  """Merges the batch statistics of a model into its parameters, layer by layer.

  `save` and `Weights.fit` take the two as one tree.

  Args:
    variables: variables of a model, {"params": ...} and maybe "batch_stats".

  Returns:
    One tree of arrays.

  Example:
    ```python
    from mixer_jax import pretrained

    variables = {"params": {"norm": {"scale": 1.0}}, "batch_stats": {"norm": {"mean": 0.0}}}
    assert pretrained.beside(variables) == {"norm": {"scale": 1.0, "mean": 0.0}}
    ```
  """
  flat = (traverse_util.flatten_dict(dict(variables.get(k, {}))) for k in _COLLECTIONS)
  return traverse_util.unflatten_dict({path: x for tree in flat for path, x in tree.items()})


def read(source: str | os.PathLike, cache_dir: str = "", use_ema: bool = True) -> Weights:
  """Reads public weights, or weights that `save` wrote.

  The contents of a file tell its kind, not its name; nothing in a file is executed.

  Args:
    source: a path; or an address (https://, gs:// and others) or a name of `CATALOG` to download.
    cache_dir: where downloads are kept; "": ~/.cache/mixer_jax/weights.
    use_ema: whether to take the moving average of the weights where a file has both, as timm does;
      the log says so.

  Returns:
    A `Weights`.

  Raises:
    UserError: the file is missing, damaged, or not of a known layout.

  Example:
    After the example of `save`:

    ```python
    weights = pretrained.read("mine.npz")  # or a name, as "google/imagenet1k/Mixer-B_16"
    print(weights.num_classes, weights.fields, sorted(weights.arrays)[:3])
    ```
  """
  source = os.fspath(source)
  path, sha256 = files.local(source, cache_dir)
  arrays, notes = containers.read(path, use_ema)
  layout, arrays = layouts.convert(source, arrays)
  known = layouts.LAYOUTS[layout]
  entry = catalog.find(source) or catalog.find_by_sha256(sha256)
  fields, normalization = dict(known.fields), (entry or known).normalization
  model = entry.model if entry else ""
  size = (notes or {}).get("image_size") or 0
  weights = Weights(source, sha256, layout, arrays, fields, normalization, model, size)
  if notes:
    with as_user_error(f"{source}: the notes in it are damaged"):
      statistics = notes["normalization"] and Normalization(*map(tuple, notes["normalization"]))
      weights = dataclasses.replace(weights, fields=notes["fields"], normalization=statistics)
  else:
    if not entry and layout == "timm_mixer" and catalog.is_miil(source, weights.num_classes):
      weights = dataclasses.replace(weights, normalization=catalog.ZERO_TO_ONE)
    weights = _as_configured(weights, path)
  if layout.startswith("resnet") and (other := re.search(r"resnet(aa|blur)", source)):
    raise UserError(f"{source}: {other[0]} has layers without parameters that this ResNet lacks")
  _LOG.info(
    "Read %s: %s, %d parameters, %d classes, SHA-256 %s",
    *(source, known.title, sum(a.size for a in arrays.values()), weights.num_classes, sha256),
  )
  return weights


def _as_configured(weights: Weights, path: pathlib.Path) -> Weights:
  """Takes the normalization of timm's config.json beside a file, if there is one."""
  config = files.config_beside(path)
  own = config.get("pretrained_cfg", config)  # older ones are flat
  if "architecture" not in config or not {"mean", "std"} <= own.keys():
    return weights
  where = path.with_name("config.json")
  with as_user_error(f"{where}: mean and std are no three numbers each"):
    mean, std = (tuple(map(float, own[name])) for name in ("mean", "std"))
    told = Normalization(*map(tuple, np.reshape((mean, std), (2, 3)).tolist()))
  if weights.normalization not in (None, told):
    said = (where, *told, *weights.normalization)
    _LOG.info("%s has mean %s and std %s, where %s and %s are usual: its own are taken", *said)
  classes = config.get("num_classes", own.get("num_classes", weights.num_classes))
  if weights.num_classes not in (0, classes):
    _LOG.warning(
      "%s is of %s classes, but %s has %d", where, classes, path.name, weights.num_classes
    )
  return dataclasses.replace(weights, normalization=told)


class Loaded(NamedTuple):
  """What `load` returns.

  Attributes:
    model: a Linen module.
    params: its parameters.
    normalization: normalization of the pixels that it takes; None: not known.
  """

  model: Any
  params: Any
  normalization: Normalization | None


def load(
  source: str | os.PathLike,
  name: str,
  num_classes: int = 0,
  image_size: Size = 0,
  resize_tokens: str = "",
  cache_dir: str = "",
  use_ema: bool = True,
  **overrides: Any,
) -> Loaded:
  """Reads weights and builds the named model with the GELU and the epsilons of their code.

  Args:
    source: a path, an address or a name of `CATALOG`, as for `read`.
    name: name of the model, a key of `models.VARIANTS`.
    num_classes: 0 means as many as the file has; another number gets a fresh zero head.
    image_size: side of the images in pixels, or height and width; 0 means the size of the model.
    resize_tokens: what to do where images have another number of patches, as for `Weights.fit`.
    cache_dir: where downloads are kept, as for `read`.
    use_ema: whether to take the moving average, as for `read`.
    **overrides: values of fields that replace those of the named model.

  Returns:
    The model, its parameters and the normalization of its pixels.

  Raises:
    UserError: the weights cannot be read or do not fit the model, there is no such model, or it
      has batch statistics (`Weights.fit_variables` gives them).

  Example:
    After the example of `save`:

    ```python
    model, params, normalization = pretrained.load("mine.npz", "mixer_s4", **sizes)
    ```
  """
  known, size = models.fields(name), image_size or models.image_size(name)
  weights = read(source, cache_dir, use_ema)
  fields = weights.model_fields(size, resize_tokens)
  fields = {field: value for field, value in fields.items() if field in known}
  model = models.build(name, num_classes or weights.num_classes, **fields | overrides)
  with as_user_error(f"model {name}", ValueError):
    images = jax.ShapeDtypeStruct((1, *pair(size), 3), jnp.float32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), images)
  if "batch_stats" in shapes:
    raise UserError(f"{name} has batch statistics, too; read(FILE).fit_variables gives all")
  patch = pair(getattr(model, "patch_size", 1))
  grid = tuple(n // side for n, side in zip(pair(size), patch))
  params = weights.fit(shapes["params"], resize_tokens, grid=grid)
  return Loaded(model, params, weights.normalization)


def save(
  path: str | os.PathLike,
  params: Any,
  model: Any = None,
  normalization: Normalization | None = None,
  image_size: Size = 0,
) -> None:
  """Saves parameters as `.npz` with Linen's names, the layout of Google's files, for its loaders.

  Args:
    path: a path that ends in `.npz`; a file there is replaced whole, or not at all.
    params: the parameters, with batch statistics by `beside`; scanned blocks are written one by
      one.
    model: their model, whose GELU, epsilons and the like are noted for `read`.
    normalization: normalization of the pixels it was trained on, noted as well.
    image_size: size of the images that the model takes, noted as well; 0: any or a square.

  Raises:
    UserError: the path has another ending, or cannot be written.

  Example:
    ```python
    import jax
    import jax.numpy as jnp
    from mixer_jax import models, pretrained

    sizes = dict(num_blocks=1, hidden_dim=8)
    model = models.build("mixer_s4", num_classes=10, **sizes)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 32, 32, 3)))["params"]
    pretrained.save("mine.npz", params, model)
    ```
  """
  path = user_path(path)
  if path.suffix != ".npz":
    raise UserError(f"{path}: weights are saved as .npz")
  fields = {
    name: kind(getattr(model, name)) for name, kind in UNSEEN.items() if hasattr(model, name)
  }
  notes = {"fields": fields, "normalization": normalization, "image_size": image_size}
  arrays = traverse_util.flatten_dict(models.unrolled(params), sep="/")
  with as_user_error(f"{path}: cannot be written", OSError):
    containers.write(path, arrays, notes if model or normalization or image_size else {})
