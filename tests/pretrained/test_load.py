"""From a file to a model with its parameters, by one call."""

import jax
import numpy as np
import pytest

from mixer_jax import pretrained
from tests.pretrained.conftest import FAMILIES, error, run, shapes

HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
PEERS = dict(google_mixer=HALF, timm_mixer=HALF, timm_gmlp=HALF)
PEERS |= dict(timm_resmlp=IMAGENET, deit_resmlp=IMAGENET)
VARIANTS = {"mixer": "mixer_small", "resmlp": "resmlp_s12", "gmlp": "gmlp_small"}


def load(peer, **options):
  """As a user would, by the name of a model and its sizes."""
  options = dict(image_size=32) | FAMILIES[peer.family].keywords | dict(num_classes=0) | options
  return pretrained.load(peer.path, VARIANTS[peer.family], **options)


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.first(2)
def test_one_call_gives_the_peers_model_with_its_gelu_and_epsilons(peer, name):
  peer = peer(name)
  model, params, normalization = load(peer)
  logits, tokens = run(model, params, peer.images)
  assert error(logits, peer.logits) < 1e-5
  assert error(tokens, peer.tokens) < 1e-5
  assert normalization == PEERS[name]


def test_one_call_takes_other_fields_classes_and_resolutions(peer):
  tanh = peer("timm_mixer_tanh")
  assert error(run(*load(tanh, gelu="tanh")[:2], tanh.images)[1], tanh.tokens) < 1e-5
  google = peer("google_mixer")
  sizes = {k: FAMILIES["mixer"].keywords[k] for k in ("patch_size", "hidden_dim", "num_blocks")}
  sizes |= dict(channels_mlp_dim=64)
  model, params, _ = pretrained.load(google.path, "mixer_small", 7, 64, "block_diagonal", **sizes)
  assert (model.num_classes, model.tokens_mlp_dim, model.gelu) == (7, 4 * 8, "tanh")
  assert params["head"]["kernel"].shape == (16, 7) and not np.any(params["head"]["kernel"])
  assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, shapes(model, 64))
