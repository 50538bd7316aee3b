"""A model's arrays over the tiers: GPU memory, host RAM, NVMe. Imports no module by itself."""
