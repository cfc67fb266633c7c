"""Makes tests/fixtures/published_operators.npz: outputs of the published code of neural operators.

Each array holds what that code gives in float32, in evaluation, for the parameters, values and
positions that `drawn` of tests/models/test_operators.py draws. Its attention weights are not
dropped, and its grids between the fine and the coarse one are ours (mixer_jax/models/galerkin.py).
Run it with clones of scaomath/galerkin-transformer and zongyi-li/fourier_neural_operator:

  git clone https://github.com/scaomath/galerkin-transformer GALERKIN_CLONE
  git clone https://github.com/zongyi-li/fourier_neural_operator FNO_CLONE
  git -C FNO_CLONE fetch origin pull/52/head
  git -C FNO_CLONE checkout fd7b0de
  python tests/make_operator_fixtures.py GALERKIN_CLONE FNO_CLONE

It needs the extras "test" and "torch" of this package, nothing more. It prints how far the arrays
are from those in the file that it replaces.

Made with PyTorch 2.13.0, NumPy 2.4.6, JAX 0.9.1 and Flax 0.12.6; galerkin-transformer at commit
f9e7d6a; fourier_neural_operator at commit fd7b0de of August 2021, which no branch leads to any more:
its pull request 52 does.
"""

import contextlib
import importlib
import importlib.util
import pathlib
import re
import sys
import types
from typing import Any, Iterator

from flax import traverse_util
import numpy as np
import torch
from torch import nn
import yaml

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from mixer_jax.models import attention, interpolate
from tests import make_fixtures
from tests.models import test_operators

# Names of the published layers by ours.
_BLOCK = r"GalerkinBlock_(\d+)/"
GALERKIN_LAYERS = {
  "stem": "feat_extract.id",
  r"stem/(conv\d)/conv": r"downscaler.downsample.\1.conv.0",
  **{f"{_BLOCK}attention/{x}": rf"encoder_layers.\1.attn.linears.{i}" for i, x in enumerate("qkv")},
  **{f"{_BLOCK}attention/{x}_norm": rf"encoder_layers.\1.attn.norm_{x.upper()}" for x in "qkv"},
  f"{_BLOCK}attention/out": r"encoder_layers.\1.attn.fc",
  f"{_BLOCK}Dense_0": r"encoder_layers.\1.ff.lr1",
  f"{_BLOCK}Dense_1": r"encoder_layers.\1.ff.lr2",
  "refinement/conv0/conv": "upscaler.upsample.conv.0.conv.0",
  "decoder_in": "regressor.fc",
}
SPECTRAL_LAYERS = GALERKIN_LAYERS | {
  r"SpectralBlock_(\d+)/skip": r"regressor.spectral_conv.\1.linear",
  r"SpectralBlock_(\d+)/conv/modes": r"regressor.spectral_conv.\1.fourier_weight",
  "decoder_out": "regressor.regressor.0",
  "head": "regressor.regressor.2",
}
POINTWISE_LAYERS = GALERKIN_LAYERS | {
  r"decoder_(\d+)": r"regressor.ff.\1.0",
  "head": "regressor.out",
}
FNO_LAYERS = {
  "stem": "fc0",
  r"SpectralBlock_(\d+)/skip": r"w\1",
  r"SpectralBlock_(\d+)/conv/modes": r"conv\1.weights",
  "decoder_out": "fc1",
  "head": "fc2",
}
# Sections of galerkin-transformer's config.yml.
SECTIONS = {
  "galerkin_1d": "ex1_burgers",
  "galerkin_2d": "ex2_darcy",
  "galerkin_inverse": "ex3_darcy_inv",
}


def published_name(path: str, names: dict[str, str]) -> str:
  """The published name of one of our layers; a ValueError unless `names` has one."""
  [name] = [re.sub(ours, name, path) for ours, name in names.items() if re.fullmatch(ours, path)]
  return name


def complex_weights(kernel: np.ndarray, modes: int, rank: int) -> np.ndarray:
  """Weights [1 or 2, inputs, outputs, modes, (modes)] of `SpectralConv`'s kernels [Re W; Im W].

  In two dimensions the first is for the modes from 0 on along the first axis, the second for those
  from -modes on. The scale is the same, since both codes undo their transforms.
  """
  real, imaginary = np.split(kernel, 2, axis=1)
  weights = (real + 1j * imaginary).reshape(-1, *[modes] * rank, *real.shape[1:])
  return np.moveaxis(weights, (-2, -1), (1, 2))


def published_arrays(ours: Any, params: Any, names: dict[str, str]) -> Iterator:
  """Pairs of a published name and array; weights of modes are complex, [1 or 2, ...]."""
  layers = {}
  for (*path, leaf), x in traverse_util.flatten_dict(params["params"]).items():
    layers.setdefault("/".join(path), {})[leaf] = x
  for path, layer in layers.items():
    name = published_name(path, names)
    if path.endswith("modes"):
      yield name, complex_weights(layer["kernel"], ours.modes, len(ours.grid))
    elif path.endswith("norm"):  # of each head
      for head, (scale, bias) in enumerate(zip(layer["scale"], layer["bias"])):
        yield from ((f"{name}.{head}.weight", scale), (f"{name}.{head}.bias", bias))
    else:  # [inputs, outputs], or after the axes of a convolution
      yield f"{name}.weight", np.moveaxis(layer["kernel"], (-1, -2), (0, 1))
      if "bias" in layer:
        yield f"{name}.bias", layer["bias"]


def load(model: nn.Module, state: dict[str, np.ndarray]) -> nn.Module:
  """The model with such weights, all of them, in evaluation."""
  model.load_state_dict({name: torch.tensor(x) for name, x in state.items()})
  return model.eval()


def galerkin_model(ours: Any, params: Any, published: types.ModuleType, settings: Any) -> nn.Module:
  """The transformer of the published settings with our sizes and parameters.

  Args:
    ours: our model.
    params: its parameters.
    published: galerkin-transformer's module "model".
    settings: a section of its config.yml.
  """
  settings = settings | dict(
    n_hidden=ours.hidden_dim,
    num_encoder_layers=ours.num_blocks,
    n_head=ours.num_heads,
    dim_feedforward=ours.ffn_dim,
    freq_dim=ours.decoder_dim,
    fourier_modes=ours.modes,
    attention_type=ours.attention,
  )
  if len(ours.grid) == 1:
    model = published.SimpleTransformer(**settings)
  else:
    coarse, between = (ours.coarse,) * 2, interpolate.between(ours.grid, ours.coarse)
    back = (tuple(n - 1 for n in between), ours.grid) if ours.refine else (coarse, coarse)
    sizes = dict(downscaler_size=(between, coarse), upscaler_size=back)
    model = published.FourierTransformer2D(**settings, **sizes)
  for layer in model.encoder_layers:
    layer.attn.dropout = None  # else half of the weights are dropped, in evaluation as well
  names = POINTWISE_LAYERS
  if ours.decoder == "spectral":
    names = SPECTRAL_LAYERS
    # Published as a multiple of freq_dim.
    model.regressor.regressor[0] = nn.Linear(ours.decoder_dim, ours.decoder_mlp_dim)
    model.regressor.regressor[2] = nn.Linear(ours.decoder_mlp_dim, ours.outputs)
  state = {}
  for name, x in published_arrays(ours, params, names):
    if np.iscomplexobj(x):
      x = np.stack([x.real, x.imag], axis=-1)
      state |= {f"{name}.{i}": w for i, w in enumerate(x)} if len(x) == 2 else {name: x[0]}
    else:
      state[name] = x
  return load(model, state)


def galerkin_outputs(root: pathlib.Path, name: str, **fields: Any) -> np.ndarray:
  """Outputs [batch, *grid, 1] of galerkin-transformer; the inverse one's on the coarse grid."""
  if str(root / "libs") not in sys.path:
    sys.path.insert(0, str(root / "libs"))
  for package, used in {"pandas": (), "torchinfo": ("summary",)}.items():
    if not (package in sys.modules or importlib.util.find_spec(package)):  # no model uses them
      sys.modules[package] = types.ModuleType(package)
      vars(sys.modules[package]).update(dict.fromkeys(used))
  published = importlib.import_module("model")
  settings = yaml.safe_load((root / "config.yml").read_text())[SECTIONS[name]]
  ours = test_operators.build(name, **fields)
  params, values, _ = test_operators.drawn(ours, ours.grid)
  model, rank = galerkin_model(ours, params, published, settings), len(ours.grid)
  coarse = (ours.coarse,) * rank if ours.extractor == "cnn" else ours.grid
  places = lambda grid: torch.tensor(test_operators.places(grid)).expand(len(values), *grid, rank)
  attended = places(coarse).reshape(len(values), -1, rank)
  decoded = places(coarse if ours.extractor == "cnn" and not ours.refine else ours.grid)
  with torch.no_grad():
    return model(torch.tensor(values), None, attended, decoded)["preds"].numpy()


class _Stop(Exception):
  """Raised where a published script would read its data."""


def fno_class(root: pathlib.Path, rank: int) -> type[nn.Module]:
  """The class FNO1d or FNO2d, from a script that goes on to train."""

  def stop(*_):
    raise _Stop

  # Only the part after the class uses this module.
  sys.modules["utilities3"] = types.ModuleType("utilities3")
  sys.modules["utilities3"].MatReader = stop
  if str(root) not in sys.path:
    sys.path.insert(0, str(root))  # the script imports its own Adam
  with contextlib.suppress(_Stop):
    make_fixtures.import_file(root / f"fourier_{rank}d.py")
  return getattr(sys.modules[f"fourier_{rank}d"], f"FNO{rank}d")


def fno_outputs(root: pathlib.Path, name: str) -> np.ndarray:
  """Outputs [batch, *grid, 1] of fourier_neural_operator, which has positions of its own."""
  ours = test_operators.build(name)
  params, values, _ = test_operators.drawn(ours, ours.grid)
  rank, state = len(ours.grid), {}
  for layer, x in published_arrays(ours, params, FNO_LAYERS):
    if np.iscomplexobj(x):
      state |= {f"{layer}{i}": w for i, w in enumerate(x, 1)}
    elif re.fullmatch(r"w\d\.weight", layer):  # a convolution of one point
      state[layer] = x.reshape(*x.shape, *[1] * rank)
    else:
      state[layer] = x
  model = load(fno_class(root, rank)(*[ours.modes] * rank, ours.hidden_dim), state)
  model.padding = ours.padding
  with torch.no_grad():
    return model(torch.tensor(values)).numpy()


def main(galerkin_clone: str, fno_clone: str) -> None:
  galerkin, fno = pathlib.Path(galerkin_clone), pathlib.Path(fno_clone)
  arrays = {
    f"galerkin_1d {kind}": galerkin_outputs(galerkin, "galerkin_1d", attention=kind)
    for kind in attention.KINDS
  }
  arrays |= {x: galerkin_outputs(galerkin, x) for x in ("galerkin_2d", "galerkin_inverse")}
  arrays |= {x: fno_outputs(fno, x) for x in ("fno_1d", "fno_2d")}
  for case, old in np.load(test_operators.FIXTURE).items():
    apart = np.abs(arrays[case] - old).max() / np.abs(old).max()
    print(f"{case}: {old.shape}, up to {np.abs(old).max():.2f}, {apart:.1e} of that from the old")
  np.savez_compressed(test_operators.FIXTURE, **arrays)
  print(f"{test_operators.FIXTURE}: {test_operators.FIXTURE.stat().st_size} bytes")


if __name__ == "__main__":
  main(*sys.argv[1:])
