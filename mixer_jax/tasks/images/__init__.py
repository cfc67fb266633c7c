"""Parts that tasks on images share."""
