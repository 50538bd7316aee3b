"""Changes to decoder layers: fp8 matmuls, chunks of tokens, skipped matmuls, compilation."""
