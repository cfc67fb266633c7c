"""Functions on grids: random fields, solvers of differential equations, files, a cache. No JAX."""
