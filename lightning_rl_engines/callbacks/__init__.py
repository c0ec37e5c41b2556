"""Lightning callbacks: exporting weights, ending on Ctrl-C, what a run looks like, and what it leaves behind."""

from lightning_rl_engines.callbacks.interrupt import GracefulInterrupt, RunInterrupted
from lightning_rl_engines.callbacks.predictions import PredictionFile
from lightning_rl_engines.callbacks.progress import RunProgressBar
from lightning_rl_engines.callbacks.report import RunReport
from lightning_rl_engines.callbacks.resume import ConfiguredLearningRate
from lightning_rl_engines.callbacks.samples import SampleTable
from lightning_rl_engines.callbacks.start_card import StartCard
from lightning_rl_engines.callbacks.update_checkpoint import UpdateCheckpoint
from lightning_rl_engines.callbacks.weight_export import WeightExport
from lightning_rl_engines.modules.summary import RichShardedModelSummary, ShardedModelSummary

__all__ = [
    "ConfiguredLearningRate",
    "GracefulInterrupt",
    "PredictionFile",
    "RichShardedModelSummary",
    "RunInterrupted",
    "RunProgressBar",
    "RunReport",
    "SampleTable",
    "ShardedModelSummary",
    "StartCard",
    "UpdateCheckpoint",
    "WeightExport",
]
