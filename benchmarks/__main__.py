"""Runs a benchmark; `benchmarks/__init__.py` lists them."""

import functools
import importlib
import os

from absl import flags
from ml_collections import config_flags

from benchmarks import physics_problems
from mixer_jax.runtime import cli

# The flags that each command takes. A command is the `main` of its module, unless it stands below.
_TAKEN = {
  "input": "config models batch_size rounds photos workers",
  "dispatch": "config rounds",
  "optimizers": "config rounds",
  "costs": "study run set rounds kfac_jax",
  "updates": "config steps out",
  "uses": "",
  "precision": "",
  "gauss_newton": "rounds",
  "other_models": "",
  "train": "models optimizers batch_size dtype rounds",
  "compile": "models optimizers batch_size dtype",
  "configs": "configs set rounds memory_only",
  "inference": "models batch_size dtype rounds",
  "zoo": "models batch_size dtype rounds",
  "peers": "models batch_size dtype rounds profile torch_python",
  "text_peers": "models batch_size dtype max_length rounds torch_python",
  "translation_peers": "models batch_size dtype max_length rounds torch_python",
  "operator_peers": "models batch_size dtype points published rounds torch_python",
  "physics_peers": "problems candidates hidden seconds adam_steps peers_python",
  "scaling": "models",
  "plans": "configs devices set out",
  "plan_mixers": "models optimizers devices out",
  "plan_truth": "configs set",
  "device": "minutes set out",
  "device_steps": "config rounds out",
}
_FUNCTIONS = {
  "costs": ("optimizers", "of_study"),
  "zoo": ("inference", "zoo"),
  "device_steps": ("device", "of_steps"),
}


def _run(name: str, _: list[str]) -> None:
  if "peers" in name:  # several processes on one device
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  if name == "peers" or "peers" not in name:  # of images
    train = importlib.import_module("benchmarks.train")
    train.check(flags.FLAGS.models or (), flags.FLAGS.optimizers)
  module, function = _FUNCTIONS.get(name, (name, "main"))
  getattr(importlib.import_module(f"benchmarks.{module}"), function)(flags.FLAGS)


if __name__ == "__main__":
  config_flags.DEFINE_config_file(
    "config", None, "Config file of input, dispatch, optimizers, updates and device_steps."
  )
  flags.DEFINE_integer("rounds", 20, "Timed rounds of each candidate.", lower_bound=1)
  flags.DEFINE_bool(
    "kfac_jax", False, "Adds kfac_jax.Optimizer on the first run's classifier to costs."
  )
  flags.DEFINE_multi_string(
    "configs", [], "NAME[:ARGUMENT] of a file of configs/; default: all, without arguments."
  )
  flags.DEFINE_bool("memory_only", False, "Times no step of configs.")
  flags.DEFINE_list("models", None, "Names of models, for every command without a config.")
  flags.DEFINE_list("optimizers", ["sgd", "adam", "kfac"], "Optimizers of train and compile.")
  flags.DEFINE_integer(
    "batch_size",
    None,
    "Default: 64 in train, 16 in peers, 2 in compile, 8 in operator_peers, 32 elsewhere.",
    lower_bound=1,
  )
  flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Of the computation of --models.")
  flags.DEFINE_integer("max_length", 128, "Tokens of a sequence of text.", lower_bound=4)
  flags.DEFINE_multi_integer(
    "workers", [1, 2], "Numbers of worker processes of streamed input.", lower_bound=0
  )
  flags.DEFINE_integer("photos", 512, "Photographs of streamed input.", lower_bound=64)
  flags.DEFINE_integer(
    "profile", 0, "Kinds of operations of a step that peers lists.", lower_bound=0
  )
  flags.DEFINE_integer("steps", 300, "Steps of the run that updates follows.", lower_bound=2)
  flags.DEFINE_string("study", None, "Study file of costs.")
  flags.DEFINE_string("run", None, "Runs of the study, by name or pattern, with commas.")
  flags.DEFINE_multi_string(
    "set", [], "[VALUE:]FIELD=VALUE for runs of the study, FIELD=VALUE for configs."
  )
  flags.DEFINE_string(
    "out", None, "Picture of updates, .png; rows of plans, .csv; answers of device, .json."
  )
  flags.DEFINE_float("minutes", 10, "Time of device.", lower_bound=0.1)
  flags.DEFINE_multi_string("devices", [], "Of plans, as mixer_jax.plan takes them.")
  flags.DEFINE_multi_integer("points", [512], "Points of grids of functions.", lower_bound=64)
  flags.DEFINE_string("published", None, "Folder of the published code of operator_peers.")
  flags.DEFINE_list("problems", list(physics_problems.PROBLEMS), "Equations of physics_peers.")
  flags.DEFINE_list("candidates", None, "Candidates of physics_peers; default: all.")
  flags.DEFINE_list("hidden", ["20", "20", "20"], "Widths of the hidden layers of physics_peers.")
  flags.DEFINE_float("seconds", 60, "Training time of each candidate.", lower_bound=1)
  flags.DEFINE_integer("adam_steps", 15_000, "Steps of Adam before L-BFGS.", lower_bound=1)
  flags.DEFINE_string("peers_python", None, "Python with jinns and deepxde.")
  flags.DEFINE_string("torch_python", None, "Python with PyTorch, and for peers timm.")
  cli.run_commands({name: functools.partial(_run, name) for name in _TAKEN}, _TAKEN)
