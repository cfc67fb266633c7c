"""The directory of a run: its config, its metrics, its lock, its provenance."""
