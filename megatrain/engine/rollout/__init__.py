"""Writing answers: many rows at a time, by a family's own modules."""
