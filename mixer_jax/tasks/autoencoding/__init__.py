"""Autoencoding: images reproduced through a narrow code."""
