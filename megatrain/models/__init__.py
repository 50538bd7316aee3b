"""Hugging Face decoders without weights: `Skeleton` is what others use; its parts are here too."""
