"""Documents, packed rows and the plan that turns one into the other."""

from lightning_rl_engines.sequence.attention import bind_sequence_parallel, ensure_registered, select_kernel
from lightning_rl_engines.sequence.exchange import exchange_documents, return_columns
from lightning_rl_engines.sequence.experience import Experience
from lightning_rl_engines.sequence.packing import MicroBatch, PackedRow, pack_row
from lightning_rl_engines.sequence.planner import Plan, plan_rows

__all__ = [
    "Experience",
    "MicroBatch",
    "PackedRow",
    "Plan",
    "bind_sequence_parallel",
    "ensure_registered",
    "exchange_documents",
    "pack_row",
    "plan_rows",
    "return_columns",
    "select_kernel",
]
