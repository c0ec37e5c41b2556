"""Supervised fine-tuning through the same engine: a warm-up for a policy."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch.optim import AdamW
from typing_extensions import override

from lightning_rl_engines.algorithms import SFTLoss, TokenLoss
from lightning_rl_engines.data.base import ShardedDataModule, Split
from lightning_rl_engines.models.config import ModelConfig
from lightning_rl_engines.models.token_model import TokenModel
from lightning_rl_engines.modules.supervised import DocumentModule
from lightning_rl_engines.modules.training_data import Unit
from lightning_rl_engines.rollout.base import Prompt
from lightning_rl_engines.sequence.experience import Experience


class SFTModule(DocumentModule):
    """Trains a policy on given responses; one optimizer step per batch.

    A batch is an :class:`Experience` (``input_ids`` and ``response_mask``), or a list of prompts whose further columns
    hold the response. Metrics over the global batch: ``train/loss``, ``train/nll``, ``train/grad_norm``, ``train/lr``,
    ``train/skipped_steps``, ``train/tokens_per_second``; ``val/loss`` and ``val/nll``.

    Args:
        policy: What to train.
        loss: A token loss, or any ``loss_fn(outputs, micro_batch) -> LossOutput``.
        optimizer: Called with the trainable parameters.
        lr_scheduler: Called with the optimizer; stepped once per optimizer step.
        completion_column: Column of a prompt that holds the response: a text, to which the tokenizer's end token is
            added, or token ids, which are taken as they are.
        max_tokens_per_micro_batch: The most tokens in a row, over all ranks that share it.
        max_grad_norm: Global gradient norm to clip to; ``None`` does not clip.
        balance: Let documents change their data rank for a pass where that balances the load.
        max_skipped_steps: Raise when more than this many optimizer steps in a row had a non-finite gradient.

    Raises:
        ValueError: An argument is out of range.
    """

    policy: TokenModel

    def __init__(
        self,
        *,
        policy: ModelConfig,
        loss: TokenLoss | Callable = SFTLoss(),  # noqa: B008
        optimizer: OptimizerCallable = lambda parameters: AdamW(parameters, lr=1e-5, weight_decay=0.0),
        lr_scheduler: LRSchedulerCallable | None = None,
        completion_column: str = "completion",
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
        self.policy_config = policy
        self.completion_column = completion_column
        self.save_plain_hyperparameters(**arguments)

    @override
    def prepare(self, batch: list[Prompt] | Experience) -> Experience:
        return self.to_experience(batch)

    def to_experience(self, batch: list[Prompt] | Experience) -> Experience:
        """Turn prompts with responses into documents; an experience is returned as it is.

        Raises:
            ValueError: A prompt lacks the column, or its response is empty; the message names the prompt's index.
        """
        if isinstance(batch, Experience):
            return batch
        responses = [self._response(prompt) for prompt in batch]
        documents = list(zip(batch, responses, strict=True))
        return Experience.from_documents(
            input_ids=[[*prompt.token_ids, *response] for prompt, response in documents],
            response_mask=[[0] * len(prompt.token_ids) + [1] * len(response) for prompt, response in documents],
        )

    @override
    def units_of(self, data: ShardedDataModule, split: Split) -> Iterator[Unit]:
        yield from super().units_of(data, split)
        for items in data.items(split):
            for prompt in items:
                if isinstance(prompt, Prompt):
                    yield f"Prompt {prompt.index} for {split}", [[*prompt.token_ids, *self._response(prompt)]]

    def _response(self, prompt: Prompt) -> Sequence[int]:
        value: Any = prompt.columns.get(self.completion_column)
        if value is None:
            raise ValueError(
                f"Prompt {prompt.index} has no column {self.completion_column!r} (completion_column); it has "
                f"{sorted(prompt.columns)}."
            )
        if isinstance(value, str):
            ids = list(self.tokenizer(value, add_special_tokens=False)["input_ids"])
            end = self.tokenizer.eos_token_id
            return ids if end is None else [*ids, end]
        if not len(value):
            raise ValueError(f"Prompt {prompt.index} has an empty response in column {self.completion_column!r}.")
        return [int(token) for token in value]
