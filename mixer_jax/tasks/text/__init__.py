"""The parts that the tasks on text share."""
