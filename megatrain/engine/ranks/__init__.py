"""What several GPUs add to an engine: exchanges, sums, weights, and sequences that they share."""
