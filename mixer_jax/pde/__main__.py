"""Makes pairs of functions for operator learning.

python -m mixer_jax.pde burgers [--out=burgers.npz] [--functions=1024] [--points=8192]
    [--viscosity=0.1] [--time=1] [--length=6.2832] [--mean=0] [--seed=0] [--split=train]
python -m mixer_jax.pde darcy [--out=darcy.npz] [--functions=1024] [--points=421] [--low=3]
    [--high=12] [--seed=0] [--split=train]

Without --out the functions are left in the cache, where training finds them. The test set of a
run has --split=test --functions=100.
"""

import functools
import time

from absl import flags

from mixer_jax import options
from mixer_jax.errors import UserError
from mixer_jax.paths import user_path
from mixer_jax.pde import function_files, generate
from mixer_jax.runtime import cli


def _physics():
  """The parameters of all equations, by name."""
  return options.any_of({name: kind.make for name, kind in generate.KINDS.items()})


def make(kind: str, argv: list[str]) -> None:
  """Makes the functions of an equation and writes them, or leaves them in the cache."""
  del argv
  given = flags.FLAGS
  if given.out:
    out = user_path(given.out).absolute()
    if out.suffix != ".npz" or not out.parent.is_dir():  # before the work begins
      raise UserError(f"--out={given.out}: allowed: a file .npz in a folder that exists")
  physics = {k: v for k in _physics() if (v := getattr(given, k)) is not None}
  points = generate.KINDS[kind].points if given.points is None else given.points
  start = time.monotonic()
  made = generate.load(
    kind, given.split, given.functions, given.seed, points, given.cache_dir, **physics
  )
  if given.out:
    function_files.write(given.out, made)
  grid, seconds = " x ".join(map(str, made.grid)), time.monotonic() - start
  print(f"{given.out or 'the cache'}: {len(made):,} functions on {grid} points, {seconds:.1f} s")


if __name__ == "__main__":
  flags.DEFINE_string("out", None, "File .npz to write; without it, the cache keeps them alone.")
  flags.DEFINE_integer("functions", 1024, generate.COUNT.help)
  flags.DEFINE_integer("points", None, "Points on each axis; default: 8192, with darcy 421.")
  flags.DEFINE_integer("seed", 0, generate.SEED.help)
  flags.DEFINE_string("split", "train", "Name of the split; another one has other functions.")
  flags.DEFINE_string("cache_dir", "", "Folder of the cache; default: the user's own.")
  for name, option in _physics().items():
    flags.DEFINE_float(name, None, f"The {option.help}; default: {option.default:g}.")
  cli.run_commands({kind: functools.partial(make, kind) for kind in generate.KINDS})
