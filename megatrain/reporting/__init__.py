"""What a run tells of itself; each module is public, and nothing is imported here."""
