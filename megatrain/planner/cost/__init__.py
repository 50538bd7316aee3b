"""The cost model: `shape.shape_of` finds a model's bytes and work. May import torch."""
