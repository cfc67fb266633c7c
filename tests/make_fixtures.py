"""Makes tests/fixtures/PEER_MODEL.npz: outputs of peers' own code.

Each holds `weights`, the bytes of a file of weights as the peer's tools write it,
`images` [batch, height, width, 3] float32, and the outputs of the peer's model
in float64: `logits`, and `tokens` [batch, tokens, channels] before the last
normalisation. Weights are random, in norms and LayerScale as well, and far
from where training starts. Run it where the peer can be imported:

  python tests/make_fixtures.py timm
  python tests/make_fixtures.py convnets
  python tests/make_fixtures.py deit DIRECTORY_OF_facebookresearch_deit
  python tests/make_fixtures.py google DIRECTORY_OF_google-research_vision_transformer
  python tests/make_fixtures.py bert
  python tests/make_fixtures.py bert_classifier

timm_regnety.npz and timm_resnet_*.npz have no file of weights but `shapes`, JSON, from which
`convnet_state` draws them.

hf_bert.npz is of text: `config`, the file beside the weights, `ids`, `mask` and
`segments`, and `hidden` [layers + 1, batch, tokens, channels] of every layer.
hf_bert_classifier.npz is the same with `logits` [batch, classes].

Made with timm 1.0.31, PyTorch 2.13.0 and safetensors; deit at commit 7e160fe;
vision_transformer at commit c6de1e5 with JAX 0.9.1 and Flax 0.12.6;
transformers 5.23.0 with PyTorch 2.15.0 (bert_classifier: 5.24.0 and 2.14.1).
"""

import functools
import importlib.util
import io
import json
import pathlib
import sys
import types

import numpy as np

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
IMAGE_SIZE, PATCH_SIZE, CHANNELS, BLOCKS, CLASSES = 32, 8, 16, 2, 5
# Parameters in front of a LayerNorm are this small, or nobody would see its epsilon.
SMALL = 0.01


def images() -> np.ndarray:
  shape = (3, IMAGE_SIZE, IMAGE_SIZE, 3)
  return np.random.default_rng(0).normal(0.1, 1.0, shape).astype(np.float32)


def save(name: str, file: bytes, logits: np.ndarray, tokens: np.ndarray) -> None:
  path = FIXTURES / f"{name}.npz"
  np.savez_compressed(
    path, weights=np.frombuffer(file, np.uint8), images=images(), logits=logits, tokens=tokens
  )
  print(f"{path}: {path.stat().st_size} bytes, logits up to {np.abs(logits).max():.1f}")


def import_file(path: pathlib.Path) -> types.ModuleType:
  spec = importlib.util.spec_from_file_location(path.stem, path)
  module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def without_torchvision() -> None:
  """Lets timm be imported where torchvision is not installed; these models do not use it."""
  if importlib.util.find_spec("torchvision"):
    return

  class Names(type):
    def __getattr__(cls, name):
      return f"{cls.__name__}.{name}"

  class Anything(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
      if name.startswith("__"):
        raise AttributeError(name)
      return Names(name, (), {})

  class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
      if name.partition(".")[0] == "torchvision":
        return importlib.util.spec_from_loader(name, Finder)
      return None

    @staticmethod
    def create_module(spec):
      return Anything(spec.name)

    @staticmethod
    def exec_module(module):
      pass

  sys.meta_path.insert(0, Finder)


def save_torch(name: str, model, small: tuple[str, ...] = ("stem",), wrap=None) -> None:
  """Randomises a PyTorch model, runs it and saves the fixture."""
  from safetensors.torch import save as to_safetensors
  import torch

  generator = torch.Generator().manual_seed(0)
  with torch.no_grad():
    for key, p in model.named_parameters():
      p.copy_(0.1 + 0.3 * torch.randn(p.shape, generator=generator))
      if key.startswith(small):
        p.mul_(SMALL)
  state = {key: value.clone() for key, value in model.state_dict().items()}
  seen = {}
  model.norm.register_forward_pre_hook(lambda module, args: seen.update(tokens=args[0]))
  model = model.double().eval()
  with torch.no_grad():
    logits = model(torch.from_numpy(images()).double().permute(0, 3, 1, 2))
  if wrap:
    buffer = io.BytesIO()
    torch.save(wrap(state), buffer)
    file = buffer.getvalue()
  else:
    file = to_safetensors(state, metadata={"format": "pt"})
  save(name, file, logits.numpy(), seen["tokens"].numpy())


def make_timm() -> None:
  without_torchvision()
  from timm.models import mlp_mixer as m
  from torch import nn

  sizes = dict(
    num_classes=CLASSES,
    img_size=IMAGE_SIZE,
    patch_size=PATCH_SIZE,
    num_blocks=BLOCKS,
    embed_dim=CHANNELS,
  )
  tanh = functools.partial(nn.GELU, approximate="tanh")
  resmlp = dict(mlp_ratio=4, block_layer=m.ResBlock, norm_layer=m.Affine)
  gmlp = dict(mlp_ratio=6, block_layer=m.SpatialGatingBlock, mlp_layer=m.GatedMlp)
  save_torch("timm_mixer", m.MlpMixer(**sizes))
  save_torch("timm_mixer_tanh", m.MlpMixer(**sizes, act_layer=tanh))
  save_torch("timm_resmlp", m.MlpMixer(**sizes, **resmlp))
  save_torch("timm_gmlp", m.MlpMixer(**sizes, **gmlp), ("stem", "blocks.0.mlp_channels.fc1"))


def convnet_state(shapes: dict[str, list[int]]) -> dict[str, np.ndarray]:
  """Random arrays by PyTorch's names: kernels that keep the size of activations, and statistics."""
  rng, state = np.random.default_rng(0), {}
  for name, shape in shapes.items():
    if name.endswith("num_batches_tracked"):
      state[name] = np.array(7)
      continue
    x = rng.normal(0, 0.3, shape)
    if len(shape) > 1:
      x *= 5 / np.sqrt(np.prod(shape[1:]))
    elif name.endswith(("weight", "running_var")):
      x = 0.5 + np.abs(x)
    state[name] = x.astype(np.float32)
  return state


def save_convnet(name: str, model) -> None:
  """Runs a PyTorch model with the weights of `convnet_state` and saves the fixture."""
  import torch

  shapes = {key: list(value.shape) for key, value in model.state_dict().items()}
  model.load_state_dict({k: torch.tensor(v) for k, v in convnet_state(shapes).items()})
  with torch.no_grad():
    logits = model.double().eval()(torch.from_numpy(images()).double().permute(0, 3, 1, 2)).numpy()
  path = FIXTURES / f"{name}.npz"
  np.savez_compressed(path, shapes=json.dumps(shapes), images=images(), logits=logits)
  print(f"{path}: {path.stat().st_size} bytes, logits up to {np.abs(logits).max():.1f}")


def make_convnets() -> None:
  without_torchvision()
  from timm.models import regnet, resnet

  fields = dict(w0=8, wa=8.0, wm=2.0, group_size=4, depth=6, se_ratio=0.25)  # 1, 1, 3, 1 blocks
  save_convnet("timm_regnety", regnet.RegNet(regnet.RegNetCfg(**fields), num_classes=CLASSES))
  whole = lambda block, *layers: resnet.ResNet(block, layers=layers, num_classes=CLASSES)
  save_convnet("timm_resnet_bottleneck", whole(resnet.Bottleneck, 1, 1, 1, 1))
  save_convnet("timm_resnet_basic", whole(resnet.BasicBlock, 1, 2, 1, 1))


def make_deit(directory: str) -> None:
  without_torchvision()
  module = import_file(pathlib.Path(directory) / "resmlp_models.py")
  model = functools.partial(
    module.resmlp_models,
    img_size=IMAGE_SIZE,
    patch_size=PATCH_SIZE,
    num_classes=CLASSES,
    embed_dim=CHANNELS,
    depth=BLOCKS,
  )
  save_torch("deit_resmlp", model())
  save_torch("deit_resmlp_pth", model(), wrap=lambda state: {"model": state, "epoch": 299})


def make_google(directory: str) -> None:
  import jax

  jax.config.update("jax_enable_x64", True)
  from flax import linen as nn
  from flax import traverse_util

  module = import_file(pathlib.Path(directory) / "vit_jax" / "models_mixer.py")
  model = module.MlpMixer(
    patches=types.SimpleNamespace(size=(PATCH_SIZE, PATCH_SIZE)),
    num_classes=CLASSES,
    num_blocks=BLOCKS,
    hidden_dim=CHANNELS,
    tokens_mlp_dim=8,
    channels_mlp_dim=64,
  )
  x = images().astype(np.float64)
  shapes = jax.eval_shape(functools.partial(model.init, train=False), jax.random.key(0), x)
  rng = np.random.default_rng(1)
  params = jax.tree.map(
    lambda p: rng.normal(0.1, 0.3, p.shape).astype(np.float32), shapes["params"]
  )
  params["stem"] = jax.tree.map(lambda p: p * np.float32(SMALL), params["stem"])
  seen = {}

  def watch(call, args, kwargs, context):
    if context.module.name == "pre_head_layer_norm":
      seen["tokens"] = args[0]
    return call(*args, **kwargs)

  with nn.intercept_methods(watch):
    logits = model.apply(
      {"params": jax.tree.map(lambda p: p.astype(np.float64), params)}, x, train=False
    )
  buffer = io.BytesIO()
  np.savez(buffer, **traverse_util.flatten_dict(params, sep="/"))
  save("google_mixer", buffer.getvalue(), np.asarray(logits), np.asarray(seen["tokens"]))


def _text() -> dict[str, np.ndarray]:
  """Three sequences of 9, 4 and 7 tokens, and their segments."""
  rng = np.random.default_rng(0)
  ids, segments = rng.integers(0, 50, (3, 9)), rng.integers(0, 2, (3, 9))
  return dict(ids=ids, mask=np.arange(9) < np.array([[9], [4], [7]]), segments=segments)


def _save_bert(name: str, make, outputs, **fields) -> None:
  """Saves a model of transformers, its config, sequences, and what `outputs` computes of them."""
  from safetensors.torch import save as to_safetensors
  import torch
  import transformers

  config = transformers.BertConfig(
    vocab_size=50,
    hidden_size=CHANNELS,
    num_hidden_layers=BLOCKS,
    num_attention_heads=2,
    intermediate_size=40,
    max_position_embeddings=12,
    layer_norm_eps=0.01,  # large enough to be seen
    attn_implementation="eager",
    **fields,
  )
  model = make(config)
  generator = torch.Generator().manual_seed(0)
  with torch.no_grad():
    for p in model.parameters():
      p.copy_(0.1 + 0.3 * torch.randn(p.shape, generator=generator))
  file = to_safetensors({key: value.clone() for key, value in model.state_dict().items()})
  own = _text()
  inputs = dict(input_ids=own["ids"], attention_mask=own["mask"].astype(int))
  inputs = {
    k: torch.from_numpy(v) for k, v in (inputs | {"token_type_ids": own["segments"]}).items()
  }
  with torch.no_grad():
    found = outputs(model.double().eval(), inputs)
  np.savez_compressed(
    FIXTURES / f"{name}.npz",
    weights=np.frombuffer(file, np.uint8),
    config=config.to_json_string(),
    **own,
    **{key: value.numpy() for key, value in found.items()},
  )


def make_bert() -> None:
  import torch
  import transformers

  states = lambda model, inputs: model.bert(**inputs, output_hidden_states=True).hidden_states
  outputs = lambda model, inputs: {"hidden": torch.stack(states(model, inputs))}
  _save_bert("hf_bert", transformers.BertForPreTraining, outputs)


def make_bert_classifier() -> None:
  import transformers

  outputs = lambda model, inputs: {"logits": model(**inputs).logits}
  names = {0: "yes", 1: "no", 2: "maybe"}
  make = transformers.BertForSequenceClassification
  _save_bert("hf_bert_classifier", make, outputs, num_labels=3, id2label=names)


if __name__ == "__main__":
  makers = {"timm": make_timm, "convnets": make_convnets, "deit": make_deit}
  makers |= {"google": make_google, "bert": make_bert, "bert_classifier": make_bert_classifier}
  makers[sys.argv[1]](*sys.argv[2:])
