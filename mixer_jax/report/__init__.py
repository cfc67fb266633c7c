"""Runs and models as lines, tables and figures."""
