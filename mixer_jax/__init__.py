"""All-MLP models and second-order training in JAX."""

__version__ = "0.1.0"
