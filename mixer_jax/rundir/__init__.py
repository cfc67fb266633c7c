"""The directory of a run, as anybody may read it: config, metrics, lock, record of its sessions."""
