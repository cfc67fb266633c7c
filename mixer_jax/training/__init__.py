"""Training: state, step, loop, evaluation, checkpoints, numbers that are not finite."""
