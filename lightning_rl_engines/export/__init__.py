"""Weights out, one tensor at a time: what is exported, how it is gathered, where it goes."""

from lightning_rl_engines.export.dtensors import Piece, PieceNames, Transform, stream_dtensors
from lightning_rl_engines.export.folder import HFFolderSink
from lightning_rl_engines.export.lora import stream_merged_parameters
from lightning_rl_engines.export.plan import ExportEntry, ExportPlan, plan_from_hf_model
from lightning_rl_engines.export.server import InferenceClient, InferenceServerSink, LoRAInferenceClient
from lightning_rl_engines.export.sinks import (
    ExportContext,
    MemorySink,
    ModuleSink,
    WeightSink,
    drain,
    receiver_wants_base,
)
from lightning_rl_engines.export.stream import stream_full_gradients, stream_full_parameters

__all__ = [
    "ExportContext",
    "ExportEntry",
    "ExportPlan",
    "HFFolderSink",
    "InferenceClient",
    "InferenceServerSink",
    "LoRAInferenceClient",
    "MemorySink",
    "ModuleSink",
    "Piece",
    "PieceNames",
    "Transform",
    "WeightSink",
    "drain",
    "plan_from_hf_model",
    "receiver_wants_base",
    "stream_dtensors",
    "stream_full_gradients",
    "stream_full_parameters",
    "stream_merged_parameters",
]
