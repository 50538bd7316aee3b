"""Measures a machine: `profile.measure_machine`, `checks.check`, `disk.drive_rates`."""
