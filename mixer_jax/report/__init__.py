"""Figures, tables and pages about runs, weights and studies."""
