"""A seeded hash of 64-bit numbers, for shuffles that are the same on every machine and release."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def mix64(values: npt.NDArray[np.uint64], seed: int) -> npt.NDArray[np.uint64]:
    """Scrambled values, uint64 of the same shape, one to one for a given seed.

    The finaliser of SplitMix64 (Steele et al. 2014).
    """
    golden = 0x9E3779B97F4A7C15
    start = np.uint64((seed + 1) * golden % 2**64)
    mixed = values.astype(np.uint64) * np.uint64(golden) + start
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def permutation(size: int, seed: int, epoch: int, window: int = 0) -> npt.NDArray[np.int64]:
    """A shuffle of range(size), int64 [size], that follows from seed, epoch and window alone.

    The first window is shuffled as a whole set is.
    """
    keys = mix64(mix64(np.arange(size, dtype=np.uint64), seed), epoch)
    if window:
        keys = mix64(keys, window)
    return np.argsort(keys, kind="stable").astype(np.int64)
