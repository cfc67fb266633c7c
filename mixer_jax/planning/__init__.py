"""Programs compiled for devices that are not there: memory, communication and the time they take at least."""
