"""Files: weights, checkpoints, run folders, exports. Each module is public; none is loaded."""
