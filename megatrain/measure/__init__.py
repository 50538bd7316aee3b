"""Measures a machine: what its links, memories, processors and disk sustain under the operations that training consists of."""

from megatrain.measure.profile import measure

__all__ = ["measure"]
