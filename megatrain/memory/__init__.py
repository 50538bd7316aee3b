"""Where a model's arrays are: GPU memory, host RAM, NVMe. Each module is public; none is loaded."""
