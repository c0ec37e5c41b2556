"""Direct preference optimization through the same engine."""

from collections.abc import Callable
from typing import Any, Literal

from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch.optim import AdamW
from typing_extensions import override

from lightning_rl_engines.algorithms import DocumentLoss, DPOLoss
from lightning_rl_engines.models.config import ModelConfig
from lightning_rl_engines.models.token_model import TokenModel
from lightning_rl_engines.modules.reference import find_reference, reference_model
from lightning_rl_engines.modules.supervised import DocumentModule, require_experience
from lightning_rl_engines.sequence.experience import Experience
from lightning_rl_engines.strategies.engine import Engine


class DPOModule(DocumentModule):
    """Trains a policy on preference pairs by DPO or IPO; one optimizer step per batch.

    A batch is an :class:`Experience` of pairs (``group_ids``, ``preferred``), as
    :class:`~lightning_rl_engines.PreferenceDataModule` makes them. Its column ``ref_log_probs`` is used where it has
    one, else the reference model computes it.

    Metrics: those of :class:`DocumentModule` and of the loss, such as ``train/reward_accuracy`` and
    ``val/reward_margin``.

    Args:
        policy: What to train.
        loss: ``DPOLoss``, or any ``loss_fn(outputs, micro_batch) -> LossOutput``.
        reference: ``"auto"`` builds a frozen copy of the policy; a configuration builds that model; ``None`` builds
            none, for data with ``ref_log_probs``.
        optimizer: Called with the trainable parameters.
        lr_scheduler: Called with the optimizer; stepped once per optimizer step.
        max_tokens_per_micro_batch: The most tokens in a row, over all ranks that share it; a pair needs one row.
        max_grad_norm: Global gradient norm to clip to; ``None`` does not clip.
        balance: Let documents change their data rank for a pass where that balances the load.
        max_skipped_steps: Raise when more than this many optimizer steps in a row had a non-finite gradient.

    Raises:
        ValueError: An argument is out of range.
    """

    policy: TokenModel
    reference: TokenModel | None

    def __init__(
        self,
        *,
        policy: ModelConfig,
        loss: DocumentLoss | Callable = DPOLoss(),  # noqa: B008
        reference: Literal["auto"] | ModelConfig | None = "auto",
        optimizer: OptimizerCallable = lambda parameters: AdamW(parameters, lr=1e-6, weight_decay=0.0),
        lr_scheduler: LRSchedulerCallable | None = None,
        max_tokens_per_micro_batch: int | None = None,
        max_grad_norm: float | None = 1.0,
        balance: bool = True,
        max_skipped_steps: int = 5,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__(
            config=policy,
            loss=loss,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            max_tokens_per_micro_batch=max_tokens_per_micro_batch,
            max_grad_norm=max_grad_norm,
            balance=balance,
            max_skipped_steps=max_skipped_steps,
        )
        needed = bool(getattr(loss, "needs_reference", False))
        self.reference_config = find_reference(reference, policy, None, needed=needed)
        self.save_plain_hyperparameters(**arguments)

    @override
    def build_models(self, engine: Engine) -> None:
        super().build_models(engine)
        self.reference = None
        if isinstance(self.reference_config, ModelConfig):
            self.reference = engine.build_model(self.reference_config, trainable=False)

    @override
    def prepare(self, batch: Any) -> Experience:
        """Return the pairs with ``ref_log_probs``. Collective over the world."""
        experience = require_experience(self, batch)
        if self.reference_config is None or "ref_log_probs" in experience:
            return experience
        with reference_model(self.engine, self.policy, self.reference) as model, self.engine.eval_mode(model):
            output = self.engine.infer_batch(
                model,
                experience,
                max_tokens_per_micro_batch=self.max_tokens_per_micro_batch,
                balance=self.balance,
            )
        return experience.to("cpu").with_token_columns(ref_log_probs=output.columns["log_probs"])

    @override
    def validation_weight(self, experience: Experience) -> int:
        # The losses are means over pairs.
        return len(experience)
