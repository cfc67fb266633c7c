"""Small sets of sentences whose label a word decides, and runs of seconds on them."""

import numpy as np
import pytest

from mixer_jax import config as config_lib
from mixer_jax.text.vocabulary import Vocabulary

_WORDS = "the a film plot cast score scene story is was feels looks very rather so quite".split()
_JUDGED = {"negative": ("dull", "bad", "flat"), "positive": ("good", "fresh", "warm")}


def sentences(seed, number):
  """Pairs of a label and a sentence of 2 to 12 words."""
  rng = np.random.default_rng(seed)
  for i in range(number):
    label = tuple(_JUDGED)[i % 2]
    words = list(rng.choice(_WORDS, rng.integers(1, 12)))
    words.insert(rng.integers(len(words) + 1), rng.choice(_JUDGED[label]))
    yield label, " ".join(words)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
  """train, test (of sentences) and pairs as .tsv, and vocab.txt."""
  path = tmp_path_factory.mktemp("sentences")
  for seed, (name, number) in enumerate({"train": 640, "test": 75, "more": 30}.items()):
    rows = list(sentences(seed, number))
    lines = [f"{label}\t{text}" for label, text in rows]
    (path / f"{name}.tsv").write_text("\n".join(["label\tsentence", *lines]) + "\n")
    others = [text for _, text in rows[1:] + rows[:1]]
    pairs = [f"{label}\t{text}\t{other}" for (label, text), other in zip(rows, others)]
    (path / f"{name}_pairs.tsv").write_text("\n".join(["label\tone\tother", *pairs]) + "\n")
  special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
  judged = [word for words in _JUDGED.values() for word in words]
  (path / "vocab.txt").write_text("\n".join([*special, *_WORDS, *judged]) + "\n")
  return path


@pytest.fixture
def vocabulary(folder):
  return Vocabulary.read(folder / "vocab.txt")


@pytest.fixture
def config_of(folder, tmp_path):
  """A function from a task, a model and fields of the data to a config."""

  def make(task, model="gmlp_text_small", **data):
    config = config_lib.default(task, model)
    config.update(batch_size=32, eval_batch_size=32, num_epochs=2)
    config.mesh.data = 1
    config.model.update(num_blocks=1, hidden_dim=16)
    config.model["channels_mlp_dim" if "ffn_dim" not in _own(model) else "ffn_dim"] = 16
    config.data.update(name="files", dir=str(folder), cache_dir=str(tmp_path / "cache"))
    config.data.update(train_split="train.tsv", test_split="test.tsv", max_length=16)
    config.data.vocabulary = str(folder / "vocab.txt")
    config.data.update(data)
    config.optimizer = config_lib.optimizer("adamw", 1e-2)
    return config

  return make


def _own(model):
  from mixer_jax import models, options

  return options.of(models.ENCODERS[model])
