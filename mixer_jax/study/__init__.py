"""Grids of runs that reproduce a table: planned, run, resumed and recorded.

A study file is a Python file with `get_study()`, which returns a `Study`, and
`get_config(run)`, by which `mixer_jax.main` takes each run's config from it.
"""

from mixer_jax.study.plan import Published, Run, Study, Tuning, between, halton, load, read_config

__all__ = ("Published", "Run", "Study", "Tuning", "between", "halton", "load", "read_config")
