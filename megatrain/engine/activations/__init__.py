"""Activations between forward and backward: where they are (offload), in which form (codecs)."""
