"""Losses over the response tokens of a micro-batch: sums, and the name of what the engine divides them by."""

from lightning_rl_engines.algorithms.losses.base import (
    Metrics,
    PolicyInputs,
    PolicyLossBase,
    TokenLoss,
    fraction_metrics,
    importance_ratio,
    ratio_metrics,
)
from lightning_rl_engines.algorithms.losses.gspo import GSPOLoss
from lightning_rl_engines.algorithms.losses.policy import CISPOLoss, PolicyLoss, ReinforceLoss, clipped_surrogate
from lightning_rl_engines.algorithms.losses.preference import (
    DocumentLoss,
    DPOLoss,
    PairLoss,
    RewardModelLoss,
    RewardRegressionLoss,
)
from lightning_rl_engines.algorithms.losses.sft import SFTLoss
from lightning_rl_engines.algorithms.losses.value import ValueLoss

__all__ = [
    "CISPOLoss",
    "DPOLoss",
    "DocumentLoss",
    "GSPOLoss",
    "Metrics",
    "PairLoss",
    "PolicyInputs",
    "PolicyLoss",
    "PolicyLossBase",
    "ReinforceLoss",
    "RewardModelLoss",
    "RewardRegressionLoss",
    "SFTLoss",
    "TokenLoss",
    "ValueLoss",
    "clipped_surrogate",
    "fraction_metrics",
    "importance_ratio",
    "ratio_metrics",
]
