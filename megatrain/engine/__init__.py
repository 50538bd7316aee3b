"""A training step: sweeps, gradients, updates, activations. `megatrain.Engine` runs it."""
