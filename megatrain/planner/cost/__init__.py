"""The cost model: `dry_run.shape_of` finds a model's bytes and work. All but `shape` imports
torch."""
