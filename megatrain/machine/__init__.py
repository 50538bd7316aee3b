"""This machine (`hardware`, `profile`) and others (`datasheets`, `hypothetical`); nothing heavy."""
