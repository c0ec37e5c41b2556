"""Preference pairs from files: a prompt, the response that was chosen, and the one that was rejected."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from lightning_rl_engines.data.base import ShardedDataModule, Split
from lightning_rl_engines.data.experience import RecordedDocument, aligned, join_documents, response_ids
from lightning_rl_engines.data.prompts import PromptEncoder, read_files
from lightning_rl_engines.data.records import Record
from lightning_rl_engines.sequence.experience import Experience

_SIDES = ("chosen", "rejected")


@dataclass(frozen=True)
class PreferencePair:
    """Two documents with the same prompt."""

    chosen: RecordedDocument
    rejected: RecordedDocument


class PreferenceDataModule(ShardedDataModule[Record, PreferencePair, Experience]):
    """Preference pairs from JSON-lines or parquet files; a batch is this data rank's :class:`Experience`.

    Each row is a pair. Its prompt is text, chat messages or token ids; ``chosen`` and ``rejected`` are text, token ids,
    or chat messages that end with the assistant's answer, which alone is the response. A pair becomes two documents,
    one after the other, with equal ``group_ids`` (the pair's place in its data set) and ``preferred`` True and False.
    Where rows have ``chosen_ref_log_probs`` and ``rejected_ref_log_probs``, one number per response token, they become
    the column ``ref_log_probs``.

    Args:
        train: File, or files that are read one after another.
        val: File, or one file per validation data loader.
        test: As ``val``.
        predict: As ``val``.
        batch_size: Pairs per data rank and optimizer step.
        eval_batch_size: Pairs per data rank and batch elsewhere; ``None`` means ``batch_size``.
        prompt_column: Column of the prompt.
        chosen_column: Column of the response that was preferred.
        rejected_column: Column of the other one.
        apply_chat_template: Wrap a prompt that is text into a user message; messages are always rendered.
        system_prompt: System message for prompts that have none.
        chat_template_kwargs: Further arguments of the chat template.
        append_eos: End responses that are text with the tokenizer's end token, where reward models read the score.
        shuffle: Train in another order in each epoch.
        seed: Seed of the order.
        tokenizer: Folder or hub name; ``None`` means the tokenizer of the module that is trained.

    Raises:
        ValueError: An argument is out of its range; in ``setup`` and the loaders, when a row cannot be used, with
            its file and line.
    """

    def __init__(
        self,
        *,
        train: str | list[str] | None = None,
        val: str | list[str] | None = None,
        test: str | list[str] | None = None,
        predict: str | list[str] | None = None,
        batch_size: int = 8,
        eval_batch_size: int | None = None,
        prompt_column: str = "prompt",
        chosen_column: str = "chosen",
        rejected_column: str = "rejected",
        apply_chat_template: bool = False,
        system_prompt: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        append_eos: bool = True,
        shuffle: bool = True,
        seed: int = 0,
        tokenizer: str | None = None,
    ) -> None:
        super().__init__(
            batch_size=batch_size, eval_batch_size=eval_batch_size, shuffle=shuffle, seed=seed, tokenizer=tokenizer
        )
        self.files: dict[Split, str | list[str] | None] = {
            "train": train,
            "val": val,
            "test": test,
            "predict": predict,
        }
        self.prompt_column = prompt_column
        self.columns = {"chosen": chosen_column, "rejected": rejected_column}
        self.append_eos = append_eos
        self._template: PreferencePair | None = None
        self._encoder = PromptEncoder(
            tokenizer=self.resolve_tokenizer,
            apply_chat_template=apply_chat_template,
            system_prompt=system_prompt,
            chat_template_kwargs=chat_template_kwargs,
        )

    @override
    def read(self, split: Split) -> list[list[Record]]:
        return read_files(self.files[split], split)

    @override
    def encode(self, raw: Sequence[Record], split: Split) -> list[PreferencePair]:
        # All rows or none: documents of an experience have the same columns.
        reference = any(record.row.get(f"{side}_ref_log_probs") is not None for record in raw for side in _SIDES)
        pairs = []
        for index, record in enumerate(raw):
            prompt, _ = self._encoder(record.get(self.prompt_column, "prompt_column"), record.where)
            pairs.append(
                PreferencePair(**{side: self._document(record, prompt, side, index, reference) for side in _SIDES})
            )
        self._template = pairs[0]
        return pairs

    def _document(self, record: Record, prompt: list[int], side: str, index: int, reference: bool) -> RecordedDocument:
        where = f"{record.where}: column {self.columns[side]!r}"
        response = response_ids(
            _answer(record.get(self.columns[side], f"{side}_column"), where),
            where,
            tokenizer=self.resolve_tokenizer,
            append_eos=self.append_eos,
        )
        columns: dict[str, Any] = {"group_ids": index, "preferred": side == "chosen"}
        if reference:
            name = f"{side}_ref_log_probs"
            value, place = record[name], f"{record.where}: column {name!r}"
            if not isinstance(value, list):
                raise ValueError(f"{place} must be a list with one number per response token, not {value!r}.")
            columns["ref_log_probs"] = aligned(value, len(prompt), len(response), place)
        return RecordedDocument([*prompt, *response], len(response), columns, record.where)

    @override
    def documents(self, split: Split) -> Iterator[tuple[RecordedDocument, ...]]:
        return ((pair.chosen, pair.rejected) for pairs in self._encoded(split) for pair in pairs)

    @override
    def collate(self, items: list[PreferencePair]) -> Experience:
        if not items:
            # The same columns and types as those of ranks that have pairs.
            assert self._template is not None
            return self.collate([self._template]).select([])
        return join_documents([document for pair in items for document in (pair.chosen, pair.rejected)])


def _answer(value: Any, where: str) -> Any:
    """Return the text of the assistant's last message; anything but messages is returned as it is."""
    if not isinstance(value, list) or not value or not isinstance(value[-1], dict):
        return value
    if value[-1].get("role") != "assistant" or not isinstance(value[-1].get("content"), str):
        raise ValueError(f"{where}: the last message must be the assistant's, with text as content, not {value[-1]!r}.")
    return value[-1]["content"]
