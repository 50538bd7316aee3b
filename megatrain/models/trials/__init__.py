"""Trials of a model family on small models, and what must be known before any allocation."""
