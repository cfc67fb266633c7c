"""Datasets of any kind of example: their order, their way to the devices, their cache on disk."""
