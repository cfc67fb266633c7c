"""Operator learning: maps from functions to functions, such as a PDE's solution operator."""
