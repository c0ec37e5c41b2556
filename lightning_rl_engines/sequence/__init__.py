"""Documents, packed rows and the plan that turns one into the other."""

from lightning_rl_engines.sequence.experience import Experience
from lightning_rl_engines.sequence.packing import MicroBatch, PackedRow, pack_row

__all__ = ["Experience", "MicroBatch", "PackedRow", "pack_row"]
