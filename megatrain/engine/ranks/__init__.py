"""Several GPUs: the exchange of weights and sums, and context parallelism."""
