"""ResNet and RegNetY against NumPy in float64, published numbers of parameters, and K-FAC."""

import jax
import numpy as np
import optax
import pytest

from mixer_jax import models, optim

# As torchvision counts resnet18 and resnet50. He et al., Table 6: 0.27 and 0.85 million; the whole
# numbers are those of 6n + 2 layers of 3x3 kernels, two numbers per channel and norm, and a head.
PARAMETERS = {
  "resnet_20": (10, 269_722),
  "resnet_50": (1000, 25_557_032),
  "resnet_18": (1000, 11_689_512),
  "resnet_56": (10, 853_018),
  # Radosavovic et al., Appendix: 3.2, 11.2, 20.6, 39.2 and 83.6 million; here as timm counts.
  "regnety_002": (1000, 3_162_996),
  "regnety_016": (1000, 11_202_430),
  "regnety_040": (1000, 20_646_656),
  "regnety_080": (1000, 39_180_068),
  "regnety_160": (1000, 83_590_140),
}
# Their design: first width, slope, ratio of widths, and depth (the published configs).
DESIGNS = {
  "regnety_002": (24, 36.44, 2.49, 13),
  "regnety_016": (48, 20.71, 2.65, 27),
  "regnety_040": (96, 31.41, 2.24, 22),
  "regnety_080": (192, 76.82, 2.19, 17),
  "regnety_160": (200, 106.23, 2.48, 18),
}


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.first(2)
def test_published_numbers_of_parameters(name):
  classes, expected = PARAMETERS[name]
  images = jax.ShapeDtypeStruct((1, 32, 32, 3), np.float32)
  params = jax.eval_shape(models.build(name, classes).init, jax.random.key(0), images)["params"]
  assert sum(x.size for x in jax.tree.leaves(params)) == expected


@pytest.mark.parametrize("name", DESIGNS)
def test_widths_follow_from_the_published_designs(name):
  """Radosavovic et al., Equations 2 to 4, and widths that groups divide."""
  first, slope, ratio, depth = DESIGNS[name]
  model = models.build(name, 10)
  power = np.round(np.log((first + slope * np.arange(depth)) / first) / np.log(ratio))
  widths, blocks = np.unique(np.round(first * ratio**power / 8) * 8, return_counts=True)
  group = model.group_width
  assert tuple(np.round(widths / group) * group) == model.widths and tuple(blocks) == model.stages


def conv(x, kernel, stride):
  """Cross-correlation, padded by half the kernel on all sides as PyTorch's padding=k//2."""
  side, groups = kernel.shape[0], x.shape[-1] // kernel.shape[2]
  x = np.pad(x, ((0, 0), *[(side // 2, side // 2)] * 2, (0, 0)))
  windows = np.lib.stride_tricks.sliding_window_view(x, (side, side), axis=(1, 2))
  windows = windows[:, ::stride, ::stride]
  parts = zip(np.split(windows, groups, 3), np.split(kernel, groups, 3))
  return np.concatenate([np.einsum("bhwcyx,yxcf->bhwf", *pair) for pair in parts], 3)


def norm(x, params, stats, train):
  """The normalised x, and the new averages."""
  mean, var = (x.mean((0, 1, 2)), x.var((0, 1, 2))) if train else (stats["mean"], stats["var"])
  new = {k: 0.9 * stats[k] + 0.1 * v for k, v in (("mean", mean), ("var", var))}
  return (x - mean) / np.sqrt(var + 1e-5) * params["scale"] + params["bias"], new


def largest_of_3x3(x):
  x = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=-np.inf)
  return np.lib.stride_tricks.sliding_window_view(x, (3, 3), axis=(1, 2))[:, ::2, ::2].max((4, 5))


def numpy_resnet(variables, x, model, train):
  """PyTorch's networks, and the averages by layer."""
  params, stats, new = variables["params"], variables["batch_stats"], {}

  def layer(x, at, conv_name, norm_name, stride):
    own, averages, kept = params, stats, new
    for name in at:
      own, averages, kept = own[name], averages[name], kept.setdefault(name, {})
    y = conv(x, own[conv_name]["kernel"], stride)
    y, kept[norm_name] = norm(y, own[norm_name], averages[norm_name], train)
    return y

  def gated(y, squeeze, excite):
    z = np.maximum(y.mean((1, 2)) @ squeeze["kernel"] + squeeze["bias"], 0)
    return y / (1 + np.exp(-(z @ excite["kernel"] + excite["bias"])))[:, None, None]

  regnet = hasattr(model, "widths")
  large = not regnet and model.stem == "large"
  x = np.maximum(layer(x, (), "stem", "stem_norm", 2 if large or regnet else 1), 0)
  x = largest_of_3x3(x) if large else x
  three = regnet or model.bottleneck
  kind = "RegNetYBlock" if regnet else "BottleneckBlock" if three else "BasicBlock"
  depth, strided = (3, 1) if three else (2, 0)
  places = [(stage, block) for stage, n in enumerate(model.stages) for block in range(n)]
  for i, (stage, block) in enumerate(places):
    stride, at, y = 2 if (stage or regnet) and not block else 1, (f"{kind}_{i}",), x
    for j in range(depth):
      y = layer(y, at, f"conv{j + 1}", f"norm{j + 1}", stride if j == strided else 1)
      y = np.maximum(y, 0) if j < depth - 1 else y
      if regnet and j == 1:
        y = gated(y, params[at[0]]["squeeze"], params[at[0]]["excite"])
    if "shortcut" in params[at[0]]:
      x = layer(x, at, "shortcut", "shortcut_norm", stride)
    elif x.shape != y.shape:
      x = np.pad(x[:, ::2, ::2], ((0, 0),) * 3 + ((0, y.shape[3] - x.shape[3]),))
    x = np.maximum(x + y, 0)
  return x.mean((1, 2)) @ params["head"]["kernel"] + params["head"]["bias"], new


CASES = {
  "resnet_20": dict(stages=(1, 2), width=3),
  "resnet_18": dict(stages=(1, 1), width=3),
  "resnet_50": dict(stages=(1, 1), width=2),
  "regnety_002": dict(stages=(1, 2), widths=(6, 8), group_width=2),
}


def shaken(model, images):
  """Variables without zeros or ones."""
  rng = np.random.default_rng(0)
  fresh = jax.eval_shape(model.init, jax.random.key(0), images)
  noise = lambda x: rng.normal(0, 0.5, x.shape).astype(np.float32)
  return jax.tree.map(lambda x: np.abs(noise(x)) + 0.2 if x.ndim == 1 else noise(x), fresh)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.first(1)
def test_outputs_and_averages_are_those_of_numpy(name, train):
  model = models.build(name, 4, **CASES[name])
  images = np.random.default_rng(1).normal(size=(3, 9, 8, 3)).astype(np.float32)
  variables = shaken(model, images)
  apply = jax.jit(lambda v: model.apply(v, images, train=train, mutable=["batch_stats"]))
  found, changed = apply(variables)
  doubles = jax.tree.map(np.float64, variables)
  expected, averages = numpy_resnet(doubles, images.astype(float), model, train)
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
  compare = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
  jax.tree.map(compare, changed["batch_stats"], averages if train else doubles["batch_stats"])


@pytest.mark.thorough
def test_kfac_lowers_the_loss_by_stored_averages():
  model = models.build("resnet_20", 4, stages=(1,), width=4)
  labels = np.arange(32) % 4
  images = np.random.default_rng(0).normal(size=(32, 6, 6, 3)) + labels[:, None, None, None]
  images = images.astype(np.float32)
  variables = jax.jit(model.init)(jax.random.key(0), images)
  params, stats = variables["params"], variables["batch_stats"]

  def predict(params, batch):
    (images, labels), stats = batch
    return model.apply({"params": params, "batch_stats": stats}, images), labels

  def loss(params, stats):
    own = {"params": params, "batch_stats": stats}
    logits, changed = model.apply(own, images, train=True, mutable=["batch_stats"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), changed["batch_stats"]

  batch = ((images, labels), stats)
  curvature = optim.Curvature(predict, params, batch, in_axes=(0, None))
  tx = optim.kfac(0.2, curvature, damping=0.1, inverse_period=1)
  kinds = {block.name: block.kind for block in curvature.blocks if block.kind == "kronecker"}
  assert set(kinds) == {"stem", "BasicBlock_0/conv1", "BasicBlock_0/conv2", "head"}

  @jax.jit
  def step(params, stats, state, key):
    (value, new), grads = jax.value_and_grad(loss, has_aux=True)(params, stats)
    batch = ((images, labels), stats)
    updates, state = tx.update(grads, state, params, batch=batch, rng=key)
    return optax.apply_updates(params, updates), new, state, value

  state, values = tx.init(params), []
  for i in range(15):
    params, stats, state, value = step(params, stats, state, jax.random.key(i))
    values.append(float(value))
  assert values[0] == pytest.approx(np.log(4), rel=1e-5)
  assert values[-1] < 0.5 * values[0]
