"""Pure maths of RL post-training on torch tensors: advantages, losses, KL estimators, aggregation."""

from lightning_rl_engines.algorithms.advantages import (
    Advantage,
    DrGRPOAdvantage,
    GRPOAdvantage,
    ReinforcePlusPlusAdvantage,
    RLOOAdvantage,
)
from lightning_rl_engines.algorithms.aggregation import AggregationMode, aggregate, check_aggregation, masked
from lightning_rl_engines.algorithms.corrections import CorrectionResult, CorrectionSums, RolloutCorrection
from lightning_rl_engines.algorithms.filters import overlong_penalty, zero_variance_groups
from lightning_rl_engines.algorithms.gae import gae, kl_penalty_rewards, outcome_rewards
from lightning_rl_engines.algorithms.kl import KLEstimator, kl_estimate
from lightning_rl_engines.algorithms.losses import (
    CISPOLoss,
    DocumentLoss,
    DPOLoss,
    GSPOLoss,
    PairLoss,
    PolicyInputs,
    PolicyLoss,
    PolicyLossBase,
    ReinforceLoss,
    RewardModelLoss,
    RewardRegressionLoss,
    SFTLoss,
    TokenLoss,
    ValueLoss,
)
from lightning_rl_engines.algorithms.outputs import Denominator, LossOutput, MetricReduction, TokenOutputs
from lightning_rl_engines.algorithms.whitening import Moments, global_moments, whiten

__all__ = [
    "Advantage",
    "AggregationMode",
    "CISPOLoss",
    "CorrectionResult",
    "CorrectionSums",
    "DPOLoss",
    "Denominator",
    "DocumentLoss",
    "DrGRPOAdvantage",
    "GRPOAdvantage",
    "GSPOLoss",
    "KLEstimator",
    "LossOutput",
    "MetricReduction",
    "Moments",
    "PairLoss",
    "PolicyInputs",
    "PolicyLoss",
    "PolicyLossBase",
    "RLOOAdvantage",
    "ReinforceLoss",
    "ReinforcePlusPlusAdvantage",
    "RewardModelLoss",
    "RewardRegressionLoss",
    "RolloutCorrection",
    "SFTLoss",
    "TokenLoss",
    "TokenOutputs",
    "ValueLoss",
    "aggregate",
    "check_aggregation",
    "gae",
    "global_moments",
    "kl_estimate",
    "kl_penalty_rewards",
    "masked",
    "outcome_rewards",
    "overlong_penalty",
    "whiten",
    "zero_variance_groups",
]
