"""The paper's Mixers on many devices: compiled programs beside the cost model of `scaling`."""

import pathlib
from typing import Any, Iterator

import jax
import ml_collections

from benchmarks import plans, scaling, tables
from benchmarks.optimizers import PERIODS
from mixer_jax import config as config_lib
from mixer_jax import plan
from mixer_jax.planning import targets
from mixer_jax.runtime import cli

_MODELS = ("mixer_s32", "mixer_b16", "mixer_l16", "mixer_h14")
_TARGETS = ("h100:8", "h100:4x8", "h100:32x8")
TITLES = (
  *("Mixer", "optimizer", "devices", "compiled in s", "GiB", "MB planned", "MB of the model"),
  "step ms at least",
)


def config(model: str, optimizer: str) -> ml_collections.ConfigDict:
  """ImageNet-21k by the Mixer paper's batch, with memory saved by scanned, rematerialised blocks."""
  found = config_lib.default(model=model)
  found.data.update(name="imagenet21k", image_size=224, stored_size=224, pad=0)
  found.batch_size = scaling.BATCH_SIZE
  found.model.update(dtype="bfloat16", remat=True, scan_blocks=True)
  options = {"unpreconditioned": "^head/", **PERIODS} if optimizer == "kfac" else {}
  found.optimizer = config_lib.optimizer(optimizer, learning_rate=1e-3, **options)
  return found


def modelled(model: str) -> dict[str, float]:
  """Megabytes that a step sums by the cost model: the gradient, factors, inverses."""
  blocks = scaling.blocks_of(model)
  return {f"{name} [MB]": size / 1e6 for name, size in scaling.payloads(blocks).items()}


def main(options: Any) -> None:
  cli.without_devices()
  file = pathlib.Path(options.out) if options.out else None

  def measured() -> Iterator[list[str]]:
    for model in options.models or _MODELS:
      expected = modelled(model)
      for optimizer in options.optimizers:
        for spec in options.devices or _TARGETS:
          found = plan.plan(config(model, optimizer), targets.parse(spec))
          jax.clear_caches()
          command = f"python -m benchmarks plan_mixers --models={model} --devices={spec}"
          own = plans.numbers(found) | (
            expected if optimizer == "kfac" else {"gradient [MB]": expected["gradient [MB]"]}
          )
          if file:
            about = {"study": "devices_mixers", "data": "ImageNet-21k's shapes", "model": model}
            about |= {
              "optimizer": {"sgd": "SGD", "adam": "Adam", "kfac": "K-FAC"}[optimizer],
              "command": command,
            }
            plans.write(file, about, found, own)
          kinds = ("plain", "factors", "inverses")
          both = [f"{own.get(f'{kind} collectives [MB]', 0):.4g}" for kind in kinds]
          theirs = [f"{size:.4g}" for size in expected.values()]
          yield [
            *(f"`{model}`", optimizer, f"`{spec}`", f"{own['compiled [s]']:.0f}"),
            *(f"{own.get('memory [GiB]', 0):.3g}", ", ".join(both), ", ".join(theirs)),
            f"{own.get('least step [ms]', 0):.3g}",
          ]

  tables.show(TITLES, measured(), texts=3)
