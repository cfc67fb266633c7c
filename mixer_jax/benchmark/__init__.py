"""Measures, in one run, what a figure is compared with and the figure itself.

Machines are noisy: the candidates take turns, and medians are reported.
"""
