"""The machine: devices, processes, signals, compiled programs, commands."""
