"""Grids of runs that reproduce a table: planned, run, resumed and recorded.

A study file is a Python file with `get_study()`, which returns a `Study`, and
`get_config(run)`, by which each of its runs is one of `mixer_jax.main`.
"""

from mixer_jax.study.plan import Published, Run, Study, Tuning, read_config

__all__ = ["Published", "Run", "Study", "Tuning", "read_config"]
