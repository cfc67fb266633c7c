"""The command that draws the weights of a run."""

import types

import ml_collections
import numpy as np
import pytest

from mixer_jax.errors import UserError
from mixer_jax.report import __main__ as command


@pytest.mark.parametrize(
  "params, data",
  [
    ({"embedding": np.ones(3)}, {"image_size": 8}),
    ({"stem": {"kernel": np.ones((4, 4))}}, {"image_size": 8}),
    ({"stem": {"kernel": np.ones((4, 4, 3, 2))}}, {"points": 8}),  # patches of a function
  ],
)
def test_a_model_without_patches_of_images_is_refused(params, data, tmp_path, monkeypatch):
  options = dict(workdir=str(tmp_path), pretrained=None, checkpoint="latest", out=None)
  monkeypatch.setattr(command, "_workdir", lambda: tmp_path)
  monkeypatch.setattr(command, "_FLAGS", types.SimpleNamespace(**options))
  config = ml_collections.ConfigDict({"data": data})
  monkeypatch.setattr(command.config, "of_run", lambda _: config)
  task = types.SimpleNamespace(backbone=lambda variables: variables["teacher"])
  variables = {"params": {"head": np.ones(3)}, "teacher": params}
  monkeypatch.setattr(command.restore, "load_run", lambda *_: (task, variables))
  with pytest.raises(UserError, match="the model has no 'stem' that cuts images into patches"):
    command._weights([])
