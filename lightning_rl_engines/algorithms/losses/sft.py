"""Supervised fine-tuning."""

from typing import TYPE_CHECKING

from typing_extensions import override

from lightning_rl_engines.algorithms.aggregation import masked
from lightning_rl_engines.algorithms.losses.base import Metrics, TokenLoss
from lightning_rl_engines.algorithms.outputs import LossOutput, TokenOutputs

if TYPE_CHECKING:
    from lightning_rl_engines.sequence.packing import MicroBatch


class SFTLoss(TokenLoss):
    """Negative log-likelihood of the response tokens (maximum likelihood; Ouyang et al. 2022, section 3.5).

    Metrics: ``nll``, in nats per response token whatever the aggregation; ``entropy`` where it was computed.
    """

    @override
    def __call__(self, outputs: TokenOutputs, micro_batch: "MicroBatch") -> LossOutput:
        mask = micro_batch["response_mask"].bool()
        nll = -self.log_probs(outputs, mask)
        total, denominator = self.aggregate(nll, micro_batch)
        metrics: Metrics = {"nll": (nll.detach().sum(), "tokens")}
        if outputs.entropy is not None:
            metrics["entropy"] = (masked(outputs.entropy.detach(), mask).sum(), "tokens")
        return LossOutput(total=total, denominator=denominator, metrics=metrics)
