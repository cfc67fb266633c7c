"""Names that JAX moved are there while kfac-jax needs them, and no longer."""

import jax.core
import jax.extend.core
import pytest

from mixer_jax.runtime import imports


def test_moved_names_are_there_inside_alone(monkeypatch):
  monkeypatch.setattr(imports, "_MOVED", ("moved", "Primitive", "nowhere"))
  monkeypatch.setattr(jax.extend.core, "moved", "new place", raising=False)
  kept = vars(jax.core).get("Primitive")
  with pytest.raises(KeyError), imports.moved_names():
    assert jax.core.moved == "new place" and "nowhere" not in vars(jax.core)
    raise KeyError
  assert "moved" not in vars(jax.core) and vars(jax.core).get("Primitive") is kept
