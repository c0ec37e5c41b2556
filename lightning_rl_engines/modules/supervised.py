"""What modules that learn from given documents share: one optimizer step per batch, validation on held-out ones."""

import time
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, cast

from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.types import LRSchedulerTypeUnion
from torch.optim import Optimizer
from typing_extensions import override

from lightning_rl_engines.algorithms import DocumentLoss, TokenLoss
from lightning_rl_engines.models.config import ModelConfig
from lightning_rl_engines.models.token_model import TokenModel
from lightning_rl_engines.modules.base import RLModule
from lightning_rl_engines.modules.metrics import combine_steps
from lightning_rl_engines.modules.optimization import build_optimizer
from lightning_rl_engines.modules.tokenizer import require_tokenizer
from lightning_rl_engines.sequence.experience import Experience
from lightning_rl_engines.strategies.engine import Engine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class DocumentModule(RLModule):
    """Base of modules that take one optimizer step per batch of documents.

    Metrics over the global batch: ``train/loss`` and those of the loss, ``train/grad_norm``, ``train/lr``,
    ``train/skipped_steps``, ``train/tokens_per_second``; ``val/loss`` and those of the loss.

    Attributes:
        model_name: Name of the attribute that holds the model, from ``configure_model`` on.

    Args:
        config: What to train.
        loss: Any ``loss_fn(outputs, micro_batch) -> LossOutput``.
        optimizer: Called with the trainable parameters.
        lr_scheduler: Called with the optimizer; stepped once per optimizer step.
        **options: Arguments of :class:`RLModule`.
    """

    model_name: ClassVar[str] = "policy"

    def __init__(
        self,
        *,
        config: ModelConfig,
        loss: TokenLoss | DocumentLoss | Callable,
        optimizer: OptimizerCallable,
        lr_scheduler: LRSchedulerCallable | None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.model_config = config
        self.loss = loss
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._validated: list[tuple[dict[str, float], int]] = []

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The model's tokenizer, loaded on first use.

        Raises:
            ValueError: The model names none.
        """
        if self._tokenizer is None:
            self._tokenizer = require_tokenizer(self.model_config)
        return self._tokenizer

    @property
    def model(self) -> TokenModel:
        """The model that is trained."""
        return cast(TokenModel, getattr(self, self.model_name))

    @override
    def build_models(self, engine: Engine) -> None:
        setattr(self, self.model_name, engine.build_model(self.model_config))

    @override
    def build_optimizers(self) -> tuple[list[Optimizer], list[LRSchedulerTypeUnion]]:
        optimizer, scheduler = build_optimizer(self.model, self.optimizer, self.lr_scheduler)
        return [optimizer], [] if scheduler is None else [scheduler]

    @abstractmethod
    def prepare(self, batch: Any) -> Experience:
        """Return this data rank's documents with every column that the loss reads. Collective over the world."""

    def validation_weight(self, experience: Experience) -> int:
        """Return how much this data rank's part of a validation batch counts: its response tokens."""
        return sum(experience.response_lengths)

    @override
    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Take one optimizer step. Collective over the world."""
        started = time.perf_counter()
        experience = self.prepare(batch)
        optimizer, scheduler = self.optimizer_and_scheduler()
        with self.engine.train_mode(self.model, optimizer):
            step = self.optimize(
                self.model,
                optimizer,
                experience,
                self.loss,
                scheduler=scheduler,
                calculate_entropy=self._needs_entropy,
            )
        metrics = combine_steps([step])
        metrics["tokens_per_second"] = self.tokens_per_second(experience, started)
        self.finish_update({f"train/{name}": value for name, value in metrics.items()}, batch_size=len(experience))

    @override
    def on_train_start(self) -> None:
        """Refuse unusable training and validation documents before the first step."""
        super().on_train_start()
        self.check_data(self.model, self.max_tokens_per_micro_batch)

    @property
    def _needs_entropy(self) -> bool:
        return bool(getattr(self.loss, "needs_entropy", False))

    @override
    def on_validation_epoch_start(self) -> None:
        self._validated = []

    @override
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Compute the loss of held-out documents. Collective over the world."""
        experience = self.prepare(batch)
        with self.engine.eval_mode(self.model):
            output = self.engine.forward_backward_batch(
                self.model,
                experience,
                self.loss,
                forward_only=True,
                calculate_entropy=self._needs_entropy,
                max_tokens_per_micro_batch=self.max_tokens_per_micro_batch,
                balance=self.balance,
            )
        weight = sum(self.engine.all_gather_objects(self.validation_weight(experience), "data"))
        self._validated.append((output.metrics, weight))

    @override
    def on_validation_epoch_end(self) -> None:
        total = sum(weight for _, weight in self._validated)
        if not total:
            return
        for name in self._validated[0][0]:
            mean = sum(metrics[name] * weight for metrics, weight in self._validated) / total
            self.log_validation(f"val/{name}", mean, batch_size=total)


def require_experience(module: RLModule, batch: Any) -> Experience:
    """Return the batch, which must be an experience.

    Raises:
        ValueError: It is something else.
    """
    if not isinstance(batch, Experience):
        raise ValueError(
            f"{type(module).__name__} trains on experiences, and the batch is {type(batch).__name__}; use "
            "PreferenceDataModule or ExperienceDataModule."
        )
    return batch
