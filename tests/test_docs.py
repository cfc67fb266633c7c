"""The documents' scripts run and do what they say."""

import importlib.util
import pathlib

from mixer_jax import models, pretrained

ROOT = pathlib.Path(__file__).parent.parent


def test_kfac_trains_somebody_s_own_model():
  spec = importlib.util.spec_from_file_location("own_model", ROOT / "docs" / "own_model.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  losses = module.main(steps=200)
  assert losses[0] > 0.6 and losses[-1] < 0.02


def test_the_readme_names_every_model_and_public_file():
  text = (ROOT / "README.md").read_text()
  assert not [name for name in models.VARIANTS if f"`{name}`" not in text]
  assert not [name for name in pretrained.CATALOG if f"`{name}`" not in text]
