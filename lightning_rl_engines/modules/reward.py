"""Reward models: a score per document, learned from preference pairs or from given scores."""

from collections.abc import Callable
from typing import Any, ClassVar

from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch.optim import AdamW
from typing_extensions import override

from lightning_rl_engines.algorithms import DocumentLoss, RewardModelLoss
from lightning_rl_engines.models.config import ModelConfig
from lightning_rl_engines.models.token_model import TokenModel
from lightning_rl_engines.modules.supervised import DocumentModule, require_experience
from lightning_rl_engines.sequence.experience import Experience


class RewardModelModule(DocumentModule):
    """Trains a model with a value head to score documents; one optimizer step per batch.

    A batch is an :class:`Experience`: with ``RewardModelLoss`` pairs (``group_ids``, ``preferred``), as
    :class:`~lightning_rl_engines.PreferenceDataModule` makes them, with ``RewardRegressionLoss`` documents with
    ``targets``. The score of a document is the value at its last response token, an end token by default.

    Metrics: those of :class:`DocumentModule` and of the loss, such as ``train/reward_accuracy`` and
    ``val/reward_margin``.

    Args:
        reward_model: What to train, with ``head="value"``; a language model gets a fresh head.
        loss: ``RewardModelLoss``, ``RewardRegressionLoss``, or any ``loss_fn(outputs, micro_batch) -> LossOutput``.
        optimizer: Called with the trainable parameters.
        lr_scheduler: Called with the optimizer; stepped once per optimizer step.
        max_tokens_per_micro_batch: The most tokens in a row, over all ranks that share it; a pair needs one row.
        max_grad_norm: Global gradient norm to clip to; ``None`` does not clip.
        balance: Let documents change their data rank for a pass where that balances the load.
        max_skipped_steps: Raise when more than this many optimizer steps in a row had a non-finite gradient.

    Raises:
        ValueError: An argument is out of range, or the model has no value head.
    """

    model_name: ClassVar[str] = "reward_model"
    reward_model: TokenModel

    def __init__(
        self,
        *,
        reward_model: ModelConfig,
        loss: DocumentLoss | Callable = RewardModelLoss(),  # noqa: B008
        optimizer: OptimizerCallable = lambda parameters: AdamW(parameters, lr=1e-5, weight_decay=0.0),
        lr_scheduler: LRSchedulerCallable | None = None,
        max_tokens_per_micro_batch: int | None = None,
        max_grad_norm: float | None = 1.0,
        balance: bool = True,
        max_skipped_steps: int = 5,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__(
            config=reward_model,
            loss=loss,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            max_tokens_per_micro_batch=max_tokens_per_micro_batch,
            max_grad_norm=max_grad_norm,
            balance=balance,
            max_skipped_steps=max_skipped_steps,
        )
        if reward_model.head != "value":
            raise ValueError(
                f"reward_model=ModelConfig(head={reward_model.head!r}) gives no scores; use "
                "ModelConfig(path=..., head='value')."
            )
        self.save_plain_hyperparameters(**arguments)

    @override
    def prepare(self, batch: Any) -> Experience:
        return require_experience(self, batch)

    @override
    def validation_weight(self, experience: Experience) -> int:
        # The losses are means over documents or pairs.
        return len(experience)

    @override
    def predict_step(self, batch: Experience, batch_idx: int, dataloader_idx: int = 0) -> list[dict[str, Any]]:
        """Return ``index`` and ``score`` of each document of this data rank. Collective over the world.

        Raises:
            ValueError: A document has no response token.
        """
        experience = require_experience(self, batch)
        if 0 in experience.response_lengths:
            index = experience.response_lengths.index(0)
            raise ValueError(f"document {index} has no response token to score; append an end token to it.")
        with self.engine.eval_mode(self.reward_model):
            output = self.engine.infer_batch(
                self.reward_model,
                experience,
                max_tokens_per_micro_batch=self.max_tokens_per_micro_batch,
                balance=self.balance,
            )
        scored = experience.to("cpu").with_token_columns(values=output.columns["values"])
        documents = zip(scored.documents("values"), scored.documents("response_mask"), strict=True)
        return [{"index": index, "score": float(values[mask][-1])} for index, (values, mask) in enumerate(documents)]
