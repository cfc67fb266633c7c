"""Distillation: an image classifier learns from another one."""
