"""What becomes of the device allocator's failure."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatrain.errors import OutOfMemory


@contextmanager
def naming_the_gpu(what: str) -> Iterator[None]:
    """Turn the allocator's failure into our error, which says what did not fit and what to change.

    The activations of what failed are let go at once, so that the caller can try less while still handling the error.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        traceback.clear_frames(error.__traceback__)
        raise OutOfMemory(
            f"the GPU has no room for {what}; set a smaller train.micro_batch_tokens, or memory.gpu to what is free "
            f"({str(error).splitlines()[0]})"
        ) from error
