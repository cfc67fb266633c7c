"""Masked language models."""
