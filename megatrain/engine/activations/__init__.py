"""Activations between forward and backward: where they wait (`offload`) and in which form (`codecs`)."""
