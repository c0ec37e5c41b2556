"""What our LightningModules share: the engine behind the Trainer, optimizers, updates and their history."""

import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NoReturn, cast

import pandas as pd
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.types import LRSchedulerTypeUnion
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_rl_engines import _compat
from lightning_rl_engines.data.base import ShardedDataModule, Split
from lightning_rl_engines.models.token_model import TokenModel
from lightning_rl_engines.modules.epochs import reopen_cut_epoch
from lightning_rl_engines.modules.hyperparameters import plain
from lightning_rl_engines.modules.optimization import apply_schedule, fill_total_steps, total_optimizer_steps
from lightning_rl_engines.modules.summary import sharded_summaries
from lightning_rl_engines.modules.training_data import Unit, check_documents
from lightning_rl_engines.optim import WarmupSchedule
from lightning_rl_engines.sequence.experience import Experience
from lightning_rl_engines.strategies.engine import Engine, LossFunction

PROGRESS_BAR = ("train/reward", "train/loss", "train/tokens_per_second")
"""Training metrics that the progress bar shows."""

WITHOUT_TRAINER = (
    "to use the weights of a checkpoint on their own, turn it into a Hugging Face folder with "
    "`lightning-rl export --checkpoint DIR --output DIR`; to go on with it, pass ckpt_path to the Trainer's fit, "
    "validate, test or predict."
)


class RLModule(LightningModule):
    """Base of the modules that train through an engine, with manual optimization.

    A subclass builds its models in :meth:`build_models`, its optimizers in :meth:`build_optimizers`, and calls
    :meth:`optimize` for each optimizer step and :meth:`finish_update` at the end of each update.

    Batches stay on the host: an engine moves one row at a time to its device. ``trainer.global_step`` counts
    optimizer steps; :attr:`updates` counts experiences that were trained on.

    Args:
        max_tokens_per_micro_batch: The most tokens in a row; ``None`` puts all documents of a rank into one row.
        max_grad_norm: Global gradient norm to clip to; ``None`` does not clip.
        balance: Let documents change their data rank for a pass where that balances the load.
        max_skipped_steps: Raise when more than this many optimizer steps in a row had a non-finite gradient.

    Raises:
        ValueError: An argument is out of range.
    """

    checkpoint_key: ClassVar[str] = "rl_module"

    def __init__(
        self,
        *,
        max_tokens_per_micro_batch: int | None = None,
        max_grad_norm: float | None = 1.0,
        balance: bool = True,
        max_skipped_steps: int = 5,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        require_at_least("max_tokens_per_micro_batch", max_tokens_per_micro_batch, 1, 8192)
        require_at_least("max_skipped_steps", max_skipped_steps, 0, 5)
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm={max_grad_norm} must be positive, for instance 1.0, or None.")
        self.max_tokens_per_micro_batch = max_tokens_per_micro_batch
        self.max_grad_norm = max_grad_norm
        self.balance = balance
        self.max_skipped_steps = max_skipped_steps
        self._engine: Engine | None = None
        self._starts_over = False
        self._optimizers_and_schedulers: tuple[list[Optimizer], list[LRSchedulerTypeUnion]] | None = None
        self._open_schedules: list[WarmupSchedule] = []
        self._updates = 0
        self._skipped_in_a_row: dict[int, int] = {}
        self._history: list[dict[str, float]] = []

    def save_plain_hyperparameters(self, **arguments: Any) -> None:
        """Keep constructor arguments as ``hparams`` without live objects; repeated calls add to them.

        LightningCLI hands its own configuration over, which is plain already and is taken as it is.
        """
        given = _compat.given_hyperparameters()
        self.save_hyperparameters(given if given is not None else plain(arguments))

    # ------------------------------------------------------------------------------------------------- engine

    @property
    def engine(self) -> Engine:
        """The Trainer's strategy.

        Raises:
            MisconfigurationException: No Trainer is attached, or its strategy is not one of ours.
        """
        try:
            strategy = self.trainer.strategy
        except RuntimeError as error:
            raise MisconfigurationException(
                f"{type(self).__name__} has no Trainer, and only a Trainer's strategy can build its models; "
                f"{WITHOUT_TRAINER}"
            ) from error
        if not isinstance(strategy, Engine):
            raise MisconfigurationException(
                f"{type(self).__name__} cannot run under {type(strategy).__name__}, which is no RL engine; use "
                'Trainer(strategy="fsdp_ulysses"), on a single device too.'
            )
        return strategy

    @classmethod
    def load_from_checkpoint(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: a checkpoint is sharded over the ranks of a Trainer.

        Raises:
            MisconfigurationException: Always; the message says what to do instead.
        """
        raise MisconfigurationException(
            f"{cls.__name__}.load_from_checkpoint cannot work without a Trainer; {WITHOUT_TRAINER}"
        )

    @override
    def configure_callbacks(self) -> list[Callback]:
        """Check the Trainer's options, before Lightning's less helpful checks; bring a summary that counts shards."""
        _ = self.engine
        if self.trainer.gradient_clip_val:
            raise MisconfigurationException(
                f"Trainer(gradient_clip_val={self.trainer.gradient_clip_val}) has no effect on {type(self).__name__}, "
                f"which clips by the global norm itself; use {type(self).__name__}(max_grad_norm="
                f"{self.trainer.gradient_clip_val})."
            )
        if self.trainer.accumulate_grad_batches != 1:
            raise MisconfigurationException(
                f"Trainer(accumulate_grad_batches={self.trainer.accumulate_grad_batches}) is not needed: each "
                "optimizer step accumulates over rows already; use a larger batch and limit the memory by "
                f"{type(self).__name__}(max_tokens_per_micro_batch=8192)."
            )
        return [*sharded_summaries(self.trainer.callbacks)]  # type: ignore[attr-defined]

    @override
    def configure_model(self) -> None:
        """Build the models, once per strategy object: a second ``fit`` with the same Trainer goes on with them.

        Collective over the world.
        """
        engine = self.engine
        if self._engine is engine:
            return
        if self._engine is not None:
            self._starts_over = True
            self._updates, self._history, self._skipped_in_a_row = 0, [], {}
        self._optimizers_and_schedulers = None
        self.build_models(engine)
        self._engine = engine

    @abstractmethod
    def build_models(self, engine: Engine) -> None:
        """Build every model with ``engine.build_model`` and keep it as an attribute. Collective over the world."""

    # --------------------------------------------------------------------------------------------- optimizers

    @abstractmethod
    def build_optimizers(self) -> tuple[list[Optimizer], list[LRSchedulerTypeUnion]]:
        """Return the optimizers and at most one scheduler for each, in the same order."""

    @property
    def optimizer_steps_per_batch(self) -> int:
        """The most optimizer steps that one training batch leads to, those of all optimizers together."""
        return 1

    def count_optimizer_steps(self) -> list[int | None]:
        """Return how many steps each optimizer takes in the whole fit; ``None`` where the fit has no limit."""
        return [total_optimizer_steps(self.trainer, self.optimizer_steps_per_batch)]

    @override
    def configure_optimizers(self) -> tuple[list[Optimizer], list[LRSchedulerTypeUnion]]:
        """Return the optimizers; a second ``fit`` with the same Trainer goes on with the same ones.

        Schedules of ours without ``total_steps`` get the number of their optimizer's steps in the whole fit, anew each
        time.
        """
        if self._optimizers_and_schedulers is None:
            self._optimizers_and_schedulers = self.build_optimizers()
            self._open_schedules = [
                scheduler
                for scheduler in self._optimizers_and_schedulers[1]
                if isinstance(scheduler, WarmupSchedule) and scheduler.total_steps is None
            ]
        if self._open_schedules:
            steps = dict(zip(map(id, self._optimizers_and_schedulers[0]), self.count_optimizer_steps(), strict=True))
            for scheduler in self._open_schedules:
                fill_total_steps(scheduler, steps[id(scheduler.optimizer)])
        return self._optimizers_and_schedulers

    @override
    def on_train_start(self) -> None:
        """Take the learning rate of this step from schedules whose length has changed since the last one."""
        if self._starts_over and self.trainer.ckpt_path is None:
            rank_zero_warn(
                f"{type(self).__name__} was built by another Trainer's strategy and is built anew from its "
                "configuration: it starts over, as ckpt_path=... is not given. The same Trainer would go on with it."
            )
        self._starts_over = False
        for scheduler in self._open_schedules:
            apply_schedule(scheduler)

    def check_data(self, model: TokenModel, max_tokens_per_micro_batch: int | None) -> None:
        """Refuse training and validation data of which a pass could not take some; before the first step.

        Args:
            model: The model that reads the documents.
            max_tokens_per_micro_batch: The most tokens in a row.

        Raises:
            ValueError: On all ranks, as all read the same data; the message names the row.
        """
        data = getattr(self.trainer, "datamodule", None)
        if isinstance(data, ShardedDataModule):
            capacity = self.engine.row_capacity(max_tokens_per_micro_batch)
            for split in ("train", "val"):
                check_documents(self.units_of(data, split), model, capacity)

    def units_of(self, data: ShardedDataModule, split: Split) -> Iterator[Unit]:
        """Return the documents that a split brings, those that share a row together, with where they are from."""
        return ((unit[0].where, [document.token_ids for document in unit]) for unit in data.documents(split))

    def optimizer_and_scheduler(self, index: int = 0) -> tuple[Optimizer, LRSchedulerTypeUnion | None]:
        """Return an optimizer, in Lightning's wrapper that counts steps, and its scheduler.

        Args:
            index: Place of the optimizer among those of :meth:`build_optimizers`.
        """
        found, schedulers = self.optimizers(), self.lr_schedulers()
        optimizer: Any = found[index] if isinstance(found, list) else found
        several = schedulers if isinstance(schedulers, list) else [schedulers]
        # Not by place: an optimizer without a scheduler leaves no gap in the list.
        own = [item for item in several if item is not None and item.optimizer is optimizer.optimizer]
        return cast(Optimizer, optimizer), own[0] if own else None

    def optimize(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        experience: Experience,
        loss_fn: LossFunction,
        *,
        scheduler: LRSchedulerTypeUnion | None = None,
        temperature: float | str = 1.0,
        calculate_entropy: bool = False,
        max_tokens_per_micro_batch: int | None = None,
    ) -> dict[str, float]:
        """Take one optimizer step through the engine, and one of the scheduler unless the step was skipped.

        Collective over the world; ``experience`` holds this data rank's documents.

        Args:
            model: The model to train.
            optimizer: Lightning's wrapper of it, so that ``global_step`` counts the step.
            experience: Documents with every column that the loss reads.
            loss_fn: The loss.
            scheduler: Stepped after the optimizer.
            temperature: A number, or the name of a column.
            calculate_entropy: Whether the loss needs entropies.
            max_tokens_per_micro_batch: The most tokens in a row; ``None`` takes the module's.

        Returns:
            The loss and its metrics over the global batch, ``grad_norm``, ``skipped_steps`` (0 or 1) and ``lr``.

        Raises:
            RuntimeError: Too many steps in a row had a non-finite gradient norm.
        """
        learning_rate = float(optimizer.param_groups[0]["lr"])
        output = self.engine.train_batch(
            model,
            optimizer,
            experience,
            loss_fn,
            max_grad_norm=self.max_grad_norm,
            calculate_entropy=calculate_entropy,
            temperature=temperature,
            max_tokens_per_micro_batch=max_tokens_per_micro_batch or self.max_tokens_per_micro_batch,
            balance=self.balance,
        )
        metrics = dict(output.metrics)
        skipped = metrics.pop("skipped_step") > 0
        # While fp16 looks for its loss scale, a skipped step is part of the search.
        self._count_skipped(model, skipped and metrics.get("loss_scale", 1.0) <= 1.0)
        if scheduler is not None and not skipped:
            scheduler.step()
        return {**metrics, "skipped_steps": float(skipped), "lr": learning_rate}

    def _count_skipped(self, model: nn.Module, skipped: bool) -> None:
        count = self._skipped_in_a_row.get(id(model), 0) + 1 if skipped else 0
        self._skipped_in_a_row[id(model)] = count
        if count > self.max_skipped_steps:
            raise RuntimeError(
                f"{count} optimizer steps in a row were skipped for a non-finite gradient norm, more "
                f"than max_skipped_steps={self.max_skipped_steps} (update {self._updates}, step "
                f"{self.trainer.global_step}). The weights are those before the first of them; lower the learning "
                "rate, or look at the rewards and advantages of this batch."
            )

    # ------------------------------------------------------------------------------------ updates and history

    @property
    def updates(self) -> int:
        """Number of finished updates, each on one experience; kept in checkpoints."""
        return self._updates

    @property
    def history(self) -> pd.DataFrame:
        """One row of metrics per update: ``rl/update``, ``global_step`` and ``train/...``; kept in checkpoints."""
        return pd.DataFrame(self._history)

    def finish_update(self, metrics: Mapping[str, float], *, batch_size: int) -> None:
        """Count an update, add its row to the history and log it.

        Args:
            metrics: ``name -> value`` over the global batch, the same on every rank.
            batch_size: Documents of the update on this rank; Lightning cannot infer it.
        """
        self._updates += 1
        row = {"rl/update": float(self._updates), "global_step": float(self.trainer.global_step), **metrics}
        self._history.append(row)
        self.log_metrics({name: value for name, value in row.items() if name != "global_step"}, batch_size=batch_size)

    def tokens_per_second(self, experience: Experience, started: float) -> float:
        """Return the tokens of all data ranks per second of the slowest one. Collective over the data group.

        Args:
            experience: This data rank's documents.
            started: ``time.perf_counter()`` at the start.
        """
        found = self.engine.all_gather_objects((experience.num_tokens, time.perf_counter() - started), "data")
        return sum(tokens for tokens, _ in found) / max(seconds for _, seconds in found)

    def log_metrics(self, metrics: Mapping[str, float], *, batch_size: int) -> None:
        """Log global metrics of this step: they are the same on every rank, so nothing is reduced."""
        for name, value in metrics.items():
            self.log(name, value, batch_size=batch_size, on_step=True, on_epoch=False, prog_bar=name in PROGRESS_BAR)

    def log_validation(self, name: str, value: float, *, batch_size: int) -> None:
        """Log a global validation metric. Collective over the world.

        Every rank holds the same value. Lightning warns about epoch values that are not synchronised; the maximum of
        equal numbers is that number, exactly, however many ranks share a document.
        """
        options: dict[str, Any] = {"on_step": False, "on_epoch": True, "sync_dist": True, "reduce_fx": "max"}
        self.log(name, value, batch_size=batch_size, prog_bar=True, **options)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the number of updates and the history, as plain data; a checkpoint of a cut epoch stands inside it."""
        reopen_cut_epoch(checkpoint)
        checkpoint[self.checkpoint_key] = {"updates": self._updates, "history": [dict(row) for row in self._history]}

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore what :meth:`on_save_checkpoint` added."""
        state = checkpoint.get(self.checkpoint_key, {"updates": 0, "history": []})
        self._updates = int(state["updates"])
        self._history = [dict(row) for row in state["history"]]


def require_at_least(name: str, value: int | None, least: int, example: int) -> None:
    """Refuse a whole number below ``least``; ``None`` passes.

    Raises:
        ValueError: The message names the argument, its value and one that works.
    """
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise ValueError(f"{name}={value!r} must be a whole number of at least {least}, for instance {example}.")
