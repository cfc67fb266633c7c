"""The command that draws the weights of a run."""

import types

import numpy as np
import pytest

from mixer_jax.errors import UserError
from mixer_jax.report import __main__ as command


@pytest.mark.parametrize(
  "params", [{"embedding": np.ones(3)}, {"stem": {"kernel": np.ones((4, 4))}}]
)
def test_a_model_without_patches_is_refused(params, tmp_path, monkeypatch):
  options = dict(workdir=str(tmp_path), pretrained=None, checkpoint="latest", out=None)
  monkeypatch.setattr(command, "_workdir", lambda: tmp_path)
  monkeypatch.setattr(command, "_FLAGS", types.SimpleNamespace(**options))
  monkeypatch.setattr(command.restore, "without_data", lambda *_: (None, {"params": params}))
  with pytest.raises(UserError, match="the model has no 'stem' that cuts images into patches"):
    command._weights([])
