"""A run's metrics, panel, energy and summary. Each module is public; nothing is imported here."""
