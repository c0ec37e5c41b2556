"""RL post-training engines for PyTorch Lightning.

``import lightning_rl_engines`` registers the strategies ``fsdp_ulysses`` and ``torchtitan``, so that
``Trainer(strategy="fsdp_ulysses")`` finds them.

Vocabulary: a *document* is one prompt and its response; a *row* is documents packed one after another; a *micro-batch*
is the row that goes through the model at once; an *experience* is all documents of one update; ranks with different
*data ranks* hold different documents, ranks that share one work on the same row; the *budget* is the most tokens in a
row. A per-token column at index *t* describes token *t*.
"""

from lightning_rl_engines.__about__ import __version__
from lightning_rl_engines.algorithms import (
    Advantage,
    CISPOLoss,
    DPOLoss,
    DrGRPOAdvantage,
    GRPOAdvantage,
    GSPOLoss,
    LossOutput,
    PolicyLoss,
    PolicyLossBase,
    ReinforceLoss,
    ReinforcePlusPlusAdvantage,
    RewardModelLoss,
    RewardRegressionLoss,
    RLOOAdvantage,
    RolloutCorrection,
    SFTLoss,
    TokenLoss,
    TokenOutputs,
    ValueLoss,
)
from lightning_rl_engines.callbacks import (
    ConfiguredLearningRate,
    GracefulInterrupt,
    PredictionFile,
    RunProgressBar,
    RunReport,
    SampleTable,
    StartCard,
    UpdateCheckpoint,
    WeightExport,
)
from lightning_rl_engines.checkpoint import export_checkpoint
from lightning_rl_engines.data import (
    ExperienceDataModule,
    LengthPenalty,
    OverlongPenalty,
    PreferenceDataModule,
    PromptDataModule,
    ReasoningGymDataModule,
    ReasoningGymReward,
    Reward,
    exact_match,
    last_number_match,
)
from lightning_rl_engines.export import (
    HFFolderSink,
    InferenceClient,
    InferenceServerSink,
    LoRAInferenceClient,
    ModuleSink,
    WeightSink,
)
from lightning_rl_engines.models import ModelConfig, TokenModel
from lightning_rl_engines.modules import (
    ActorCriticModule,
    DPOModule,
    PolicyModule,
    RewardModelModule,
    RLModule,
    SFTModule,
)
from lightning_rl_engines.optim import WarmupConstant, WarmupCosine, WarmupLinear
from lightning_rl_engines.rollout import Generation, HFRollout, Prompt, RolloutEngine, VLLMRollout
from lightning_rl_engines.sequence import Experience, MicroBatch
from lightning_rl_engines.strategies import (
    BatchOutput,
    Engine,
    EnginePrecision,
    FSDPUlyssesStrategy,
    TorchTitanStrategy,
)

__all__ = [
    "ActorCriticModule",
    "Advantage",
    "BatchOutput",
    "CISPOLoss",
    "ConfiguredLearningRate",
    "DPOLoss",
    "DPOModule",
    "DrGRPOAdvantage",
    "Engine",
    "EnginePrecision",
    "Experience",
    "ExperienceDataModule",
    "FSDPUlyssesStrategy",
    "GRPOAdvantage",
    "GSPOLoss",
    "Generation",
    "GracefulInterrupt",
    "HFFolderSink",
    "HFRollout",
    "InferenceClient",
    "InferenceServerSink",
    "LengthPenalty",
    "LoRAInferenceClient",
    "LossOutput",
    "MicroBatch",
    "ModelConfig",
    "ModuleSink",
    "OverlongPenalty",
    "PolicyLoss",
    "PolicyLossBase",
    "PolicyModule",
    "PredictionFile",
    "PreferenceDataModule",
    "Prompt",
    "PromptDataModule",
    "RLModule",
    "RLOOAdvantage",
    "ReasoningGymDataModule",
    "ReasoningGymReward",
    "ReinforceLoss",
    "ReinforcePlusPlusAdvantage",
    "Reward",
    "RewardModelLoss",
    "RewardModelModule",
    "RewardRegressionLoss",
    "RolloutCorrection",
    "RolloutEngine",
    "RunProgressBar",
    "RunReport",
    "SFTLoss",
    "SFTModule",
    "SampleTable",
    "StartCard",
    "TokenLoss",
    "TokenModel",
    "TokenOutputs",
    "TorchTitanStrategy",
    "UpdateCheckpoint",
    "VLLMRollout",
    "ValueLoss",
    "WarmupConstant",
    "WarmupCosine",
    "WarmupLinear",
    "WeightExport",
    "WeightSink",
    "__version__",
    "exact_match",
    "export_checkpoint",
    "last_number_match",
]
