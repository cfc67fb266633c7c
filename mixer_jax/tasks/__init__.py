"""What is learned: loss, metrics, and the distribution that K-FAC needs.

A task offers: `init(rng)`, `batch(rng, images, labels, train)`,
`loss(params, batch, rng)`, `predict(params, batch)`, `likelihood`,
`evaluate(params, batch, mask)`, and its metric collections.
"""

from mixer_jax.tasks.classification import Classification

__all__ = ["Classification", "NAMES"]

NAMES = ("classification",)
