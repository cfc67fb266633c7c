"""Segmentation of images: a class for each pixel."""
